"""What is read from the folders of JEM runs."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.run_folder import series
from ebmguard.reference_training.jem.runs import evaluated, find_runs, load_run
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


def changed(path, change):
    """The run with another config.json."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return load_run(path)


def test_a_finished_run(tmp_path):
    alerts = [
        {"level": "WARN", "step": 3, "rule": "energy_blowup"},
        {"level": "ERROR", "step": 9, "rule": "nonfinite"},
        {"level": "ERROR", "step": 7, "rule": "energy_blowup"},
    ]
    path = write_run(
        tmp_path / "x", beta_star=2, seed=3, alerts=alerts, samples=(20, 0, 10), **SMALL
    )
    (path / "samples" / "notes.npy").write_text("")
    run = load_run(path)
    assert (run.scenario, run.beta_star, run.seed) == ("1", 2.0, 3)
    assert (run.steps, run.iterations, run.complete, run.diverged_at) == (30, 30, True, None)
    assert run.network == "WRN-10-1"
    assert run.state() == "finished 30 of 30 iterations"
    assert run.evaluations["step"].tolist() == [0, 10, 20, 30]
    assert run.evaluations["epoch"].tolist() == [0, 1, 2, 3]
    assert set(run.evaluations["features"]) == {INCEPTION["features"]}
    assert run.first_error == alerts[2]
    assert run.steps_per_epoch == 10
    assert run.epoch(25) == 2.5
    assert list(run.grids()) == [0, 10, 20]
    assert changed(path, lambda c: c.update(precision="bfloat16")).network == "WRN-10-1, bfloat16"
    # Results of a shorter run are not those of the longer one.
    longer = changed(path, lambda config: config["settings"].update(iterations=60))
    assert (longer.results, longer.steps, longer.complete) == (None, 30, False)


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
    assert (run.results, run.steps, run.complete, run.diverged_at) == (None, 17, False, None)
    assert run.state() == "stopped or still running, 17 of 30 iterations"
    assert run.evaluations["step"].tolist() == [0, 10]
    steps, values = series(run.path, ["energy_gap"])
    assert steps.tolist() == list(range(17))
    assert np.isfinite(values["energy_gap"]).all()
    (path / "evaluations.jsonl").unlink()
    # 640 images in batches of 64; the evaluations do not say yet.
    assert load_run(path).steps_per_epoch == 10
    for name in ("metrics.jsonl", "alerts.jsonl"):
        (path / name).unlink()
    begun = load_run(path)
    assert (begun.steps, len(begun.evaluations), begun.first_error, begun.grids()) == (
        0,
        0,
        None,
        {},
    )


def test_a_run_that_is_lost_but_not_over(tmp_path):
    path = write_run(tmp_path / "x", finished=False, steps=17, **SMALL)
    rows = [{"step": step, "cross_entropy": 1.0} for step in range(11)]
    rows += [{"step": step, "p_x_y/energy_gap": math.inf} for step in range(11, 17)]
    write_lines(path / "metrics.jsonl", rows)
    run = load_run(path)
    assert (run.complete, run.steps, run.diverged_at) == (False, 17, 11)
    assert run.state() == (
        "diverged at step 11 (epoch 1.1); stopped or still running, 17 of 30 iterations"
    )


IMAGES: dict[str, Any] = {"train_images": 45_000, "valid_images": 5_000, "test_images": 10_000}
LOOKS: dict[str, Any] = {"eval_every": 100, "quality_samples": 500, "stop_after": 3}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"scenario": name}, []) for name in "1234567"),
        ({**IMAGES, **LOOKS, "seed": 4}, []),
        ({"data": "cifar100"}, ["data cifar100, not cifar10"]),
        ({"depth": 10, "width": 2}, ["depth 10, not 28", "width 2, not 10"]),
        ({"iterations": 300}, ["iterations 300, not 140,600"]),
        ({"train_images": 1000}, ["train images 1,000, not 45,000"]),
        ({"lr": 0.001}, ["lr 0.001, not 0.0001"]),
        ({"n_neg": 32}, ["n neg 32, not 64"]),
        ({"noise_std": 0.0}, ["noise std 0.0, not 0.01"]),
        ({"energy_l2": 0.1}, ["energy l2 0.1, not 0.0"]),
        ({"clip_norm": 1.0}, ["clip norm 1.0, not None"]),
        ({"action": "rollback"}, ["action rollback, not warn"]),
        ({"activation": "silu", "norm": "batch"}, ["silu, not leaky_relu", "batch, not none"]),
        ({"optimizer": "sgd"}, ["optimizer sgd, not adam"]),
        ({"labels_per_class": 400}, ["labels per class 400, not None"]),
        ({"image_size": 16}, ["image size 16, not None"]),
        ({"data": "digits", "scenario": "digits", "depth": 16}, ["scenario digits, not 1 to 7"]),
    ],
)
def test_deviations_from_the_published_runs_are_named(tmp_path, settings, words):
    run = load_run(write_run(tmp_path / "x", finished=False, steps=0, **settings))
    found = run.deviations().values()
    for own, expected in zip(found, words, strict=True):
        assert own.endswith(expected)


def test_what_is_not_recorded_is_no_reproduction(tmp_path):
    path = write_run(tmp_path / "x", finished=False, steps=0)
    lacks = changed(path, lambda config: (config.pop("variant"), config["settings"].pop("width")))
    words = ["variant not recorded, not default", "width not recorded, not 10"]
    assert list(lacks.deviations().values()) == words


def test_the_measure_is_published_with_inception_and_the_whole_buffer():
    # Rows of older versions do not say whether they are comparable.
    looks: list[dict[str, Any]] = [INCEPTION, INCEPTION, OWN, {"features": "Inception"}]
    rows = [
        {"step": step, "epoch": 0.0, **look, "buffer_samples": 1_000 if step == 1 else 10_000}
        for step, look in enumerate(looks)
    ]
    found = evaluated(rows)
    assert found["published"].tolist() == [True, False, False, False]
    assert found["fixed"].tolist() == [True, True, False, False]
    assert found[["accuracy", "inception", "fid"]].isna().all(axis=None)
    assert evaluated([]).columns.tolist() == found.columns.tolist()


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
