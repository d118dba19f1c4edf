from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.run_folder import series
from ebmguard.reference_training.jem.runs import ADDED, find_runs, load_run
from tests.reference_training.jem.fabricate import INCEPTION, OWN, write_lines, write_run

SMALL: dict[str, Any] = {
    "iterations": 30,
    "steps_per_epoch": 10,
    "train_images": 640,
    "depth": 10,
    "width": 1,
}


def append(file, text):
    with file.open("a") as lines:
        lines.write(text)


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_finished_run(tmp_path):
    alerts = [
        {"level": "WARN", "step": 3, "rule": "energy_blowup"},
        {"level": "ERROR", "step": 9, "rule": "nonfinite"},
        {"level": "ERROR", "step": 7, "rule": "energy_blowup"},
    ]
    run = load_run(write_run(tmp_path / "x", beta_star=2, seed=3, alerts=alerts, **SMALL))
    assert (run.scenario, run.beta_star, run.seed) == ("1", 2.0, 3)
    assert (run.steps, run.iterations, run.complete, run.diverged_at) == (30, 30, True, None)
    assert run.network == "WRN-10-1"
    assert run.state() == "finished 30 of 30 iterations"
    assert [row.step for row in run.evaluations] == [0, 10, 20, 30]
    assert run.evaluations[1].epoch == 1
    assert run.evaluations[1].features == INCEPTION["features"]
    assert run.first_error == alerts[2]
    assert run.steps_per_epoch == 10
    assert run.epoch(25) == 2.5


def test_a_diverged_run_is_over_before_its_last_iteration(tmp_path):
    run = load_run(write_run(tmp_path / "x", diverged_at=12, steps=20, **SMALL))
    assert run.complete
    assert run.diverged_at == 12
    assert run.state() == "diverged at step 12 (epoch 1.2)"


def test_a_run_in_progress_with_torn_lines(tmp_path):
    path = write_run(tmp_path / "x", finished=False, steps=17, **SMALL)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        append(path / name, '{"step": 9')
    run = load_run(path)
    assert run.results is None
    assert (run.steps, run.complete, run.diverged_at) == (17, False, None)
    assert run.state() == "stopped or still running, 17 of 30 iterations"
    assert [row.step for row in run.evaluations] == [0, 10]
    steps, values = series(run.path, ["energy_gap"])
    assert steps.tolist() == list(range(17))
    assert np.isfinite(values["energy_gap"]).all()


@pytest.mark.parametrize(
    "row",
    [
        {"cross_entropy": 1.0, "energy_gap": -10_001.0},
        {"cross_entropy": 1.0, "energy_gap": math.nan},
        {"cross_entropy": math.nan},
        {"cross_entropy": 1.0, "p_x_y/energy_gap": math.inf},
        {"energy_gap": math.inf},
    ],
)
def test_a_run_that_is_lost_but_not_over(tmp_path, row):
    path = write_run(tmp_path / "x", finished=False, steps=17, **SMALL)
    rows = [{"step": step, "cross_entropy": 1.0} for step in range(17)]
    rows[11:] = [{"step": step, **row} for step in range(11, 17)]
    write_lines(path / "metrics.jsonl", rows)
    run = load_run(path)
    assert (run.complete, run.steps, run.diverged_at) == (False, 17, 11)
    assert run.state() == (
        "diverged at step 11 (epoch 1.1); stopped or still running, 17 of 30 iterations"
    )


def test_a_run_that_has_only_begun(tmp_path):
    path = write_run(tmp_path / "x", finished=False, steps=0, **SMALL)
    for name in ("metrics.jsonl", "evaluations.jsonl", "alerts.jsonl"):
        (path / name).unlink()
    run = load_run(path)
    assert (run.steps, run.evaluations, run.first_error, run.grids()) == (0, (), None, {})
    steps, values = series(run.path, ["energy_gap", "ess"])
    assert steps.shape == values["energy_gap"].shape == values["ess"].shape == (0,)
    # 640 images in batches of 64; the evaluations do not say yet.
    assert run.steps_per_epoch == 10
    append(path / "metrics.jsonl", '{"step": 0, "ener')
    assert load_run(path).steps == 0


def test_results_of_a_shorter_run_are_not_those_of_the_longer_one(tmp_path):
    path = write_run(tmp_path / "x", **SMALL)
    config = json.loads((path / "config.json").read_text())
    config["settings"]["iterations"] = 60
    (path / "config.json").write_text(json.dumps(config))
    run = load_run(path)
    assert (run.results, run.steps, run.iterations, run.complete) == (None, 30, 60, False)


def test_a_published_run_deviates_in_nothing(tmp_path):
    for scenario in "1234567":
        path = write_run(tmp_path / scenario, scenario=scenario, finished=False, steps=0)
        assert load_run(path).deviations() == ()
    whole: dict[str, Any] = {"train_images": 45_000, "valid_images": 5_000, "test_images": 10_000}
    looks: dict[str, Any] = {"eval_every": 100, "quality_samples": 500, "stop_after": 3}
    path = write_run(tmp_path / "whole", finished=False, steps=0, **whole, **looks)
    assert load_run(path).deviations() == ()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"data": "cifar100"}, "data cifar100, not cifar10"),
        ({"depth": 10}, "depth 10, not 28"),
        ({"width": 2}, "width 2, not 10"),
        ({"iterations": 300}, "iterations 300, not 140,600"),
        ({"train_images": 1000}, "train images 1,000, not 45,000"),
        ({"test_images": 500}, "test images 500, not 10,000"),
        ({"lr": 0.001}, "lr 0.001, not 0.0001"),
        ({"n_neg": 32}, "n neg 32, not 64"),
        ({"noise_std": 0.0}, "noise std 0.0, not 0.01"),
        ({"energy_l2": 0.1}, "energy l2 0.1, not 0.0"),
        ({"clip_norm": 1.0}, "clip norm 1.0, not None"),
        ({"action": "rollback"}, "action rollback, not warn"),
        ({"most_steps": 4}, "most steps 4, not 1"),
        ({"activation": "silu"}, "activation silu, not leaky_relu"),
        ({"image_size": 16}, "image size 16, not None"),
    ],
)
def test_deviations_are_named(tmp_path, settings, word):
    run = load_run(write_run(tmp_path / "x", finished=False, steps=0, **settings))
    assert [str(item) for item in run.deviations()] == [word]


def test_what_is_not_recorded_counts_as_a_deviation(tmp_path):
    path = write_run(tmp_path / "x", finished=False, steps=0)
    config = json.loads((path / "config.json").read_text())
    del config["settings"]["width"], config["variant"]
    (path / "config.json").write_text(json.dumps(config))
    words = [str(item) for item in load_run(path).deviations()]
    assert words == ["variant not recorded, not default", "width not recorded, not 10"]


def test_what_runs_had_before_it_was_a_setting_is_no_deviation(tmp_path):
    path = write_run(tmp_path / "x", finished=False, steps=0)
    config = json.loads((path / "config.json").read_text())
    for name in ADDED:
        del config[name]
    (path / "config.json").write_text(json.dumps(config))
    assert load_run(path).deviations() == ()


def test_the_digits_are_not_in_the_paper(tmp_path):
    run = load_run(write_run(tmp_path / "x", data="digits", scenario="digits", iterations=10))
    assert [item.name for item in run.deviations()] == ["scenario"]


def test_the_measure_is_published_with_inception_and_the_whole_buffer(tmp_path):
    rows = [
        {"step": 0, "epoch": 0.0, **features, "buffer_samples": samples}
        for features, samples in ((INCEPTION, 10_000), (INCEPTION, 1_000), (OWN, 10_000))
    ]
    # Rows of older versions do not say whether they are comparable.
    rows.append({"step": 0, "epoch": 0.0, "features": "Inception", "buffer_samples": 10_000})
    for row, expected in zip(rows, (True, False, False, False), strict=True):
        path = write_run(tmp_path / f"{expected}{len(str(row))}", evaluations=[row], **SMALL)
        assert load_run(path).evaluations[0].published_measure is expected


def test_runs_are_found_below_folders_once_and_in_order(tmp_path):
    write_run(tmp_path / "b" / "deep" / "run", beta_star=10, **SMALL)
    write_run(tmp_path / "a", beta_star=2, **SMALL)
    write_run(tmp_path / "c", beta_star=2, scenario="2", seed=1, **SMALL)
    write_run(tmp_path / "d", beta_star=2, scenario="2", seed=0, **SMALL)
    (tmp_path / "toy").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("// of another program")
    (tmp_path / "toy" / "config.json").write_text('{"scenario": "gmm", "betas": [0], "seed": 0}')
    runs = find_runs([tmp_path, tmp_path / "a", tmp_path / "b"])
    assert [run.path.name for run in runs] == ["a", "run", "d", "c"]
    with pytest.raises(ConfigError, match="toy holds no JEM run"):
        find_runs([tmp_path / "a", tmp_path / "toy"])
    with pytest.raises(ConfigError, match="nowhere holds no JEM run"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="not a run folder"):
        load_run(tmp_path / "toy")


def test_stored_samples_by_step(tmp_path):
    path = write_run(tmp_path / "x", samples=(20, 0, 10), **SMALL)
    (path / "samples" / "notes.npy").write_text("")
    assert list(load_run(path).grids()) == [0, 10, 20]


def test_other_arithmetic_is_part_of_the_networks_name(tmp_path):
    path = write_run(tmp_path / "x", **SMALL)
    change(path / "config.json", precision="bfloat16")
    assert load_run(path).network == "WRN-10-1, bfloat16"
