"""What a run keeps of its course, and what is read from the folders of runs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.run_folder import series
from ebmguard.reference_training.jem.course import Course, Kept, why_lost
from ebmguard.reference_training.jem.runs import evaluated, find_runs, load_run
from tests.reference_training.jem.fabricate import INCEPTION, OWN, write_lines, write_run


def made(*, before=3, after=2):
    """A course whose measure is a number that tells the parameters apart, and its calls."""
    network, calls = nn.Linear(3, 2), []

    def measure():
        calls.append(network.weight.detach().sum().item())
        return calls[-1]

    return Course(network, measure, before, after), calls


def drift(course, step):
    """A stand-in for training that changes what the network answers."""
    with torch.no_grad():
        rng, weight = torch.Generator().manual_seed(step), course.network.weight
        weight.add_(torch.randn(weight.shape, generator=rng))


def test_accuracy_around_events_is_of_the_parameters_that_were_there_and_measured_once():
    course, calls = made()
    every_step, evaluated = {}, []
    for step in range(14):
        every_step[step] = course.network.weight.detach().sum().item()
        if step % 5 == 0:  # an evaluation that comes in its turn
            course.see_evaluation({"step": step, "test_accuracy": every_step[step]})
        evaluated += course.before_step(step)
        drift(course, step)
        if step == 7:
            before = course.network.weight.detach().clone()
            assert course.look_at(step) == [6, 7]  # step 5 was evaluated in its turn
            assert torch.equal(course.network.weight, before)
    assert len(set(every_step.values())) == 14
    assert evaluated == [8, 9]  # step 10 in its turn
    assert len(calls) == 4
    assert course.accuracy == {s: every_step[s] for s in (0, 5, 6, 7, 8, 9, 10)}
    course, calls = made(before=2)
    evaluated = []
    for step in range(9):
        evaluated += course.before_step(step)
        drift(course, step)
        if step in (3, 4):
            evaluated += course.look_at(step)
    assert evaluated == [2, 3, 4, 5, 6]
    assert len(calls) == 5


def test_state_round_trip():
    course, other, third = (made()[0] for _ in range(3))
    names = ("accuracy", "best", "past", "watched_until")
    for step in range(4):
        course.before_step(step)
        drift(course, step)
    Kept(other, *names).load_state_dict(Kept(course, *names).state_dict())
    assert course.look_at(3) == other.look_at(3) == [1, 2, 3]
    assert course.accuracy == other.accuracy
    Kept(third, *names).load_state_dict(Kept(other, *names).state_dict())
    assert [third.before_step(step) for step in (4, 5, 6)] == [[4], [5], []]
    assert third.accuracy.keys() == {1, 2, 3, 4, 5}
    assert other.accuracy.keys() == {1, 2, 3}


@pytest.mark.parametrize(
    ("cross_entropy", "gap", "lost"),
    [
        (0.5, 9.9e3, False),
        (900.0, None, False),
        (0.5, 1.1e4, True),
        (0.5, -1.1e4, True),
        (0.5, math.nan, True),
        (math.nan, 1.0, True),
        (math.inf, None, True),
    ],
)
def test_a_step_is_lost_by_its_gap_or_its_classifier(cross_entropy, gap, lost):
    row = {"cross_entropy": cross_entropy}
    gaps = [{}] if gap is None else [{"energy_gap": gap}, {"p_x_y/energy_gap": gap}]
    for own in gaps:
        assert (why_lost(row | own) is not None) == lost


def evaluation(step, valid, **scores):
    return {"step": step, "test_accuracy": step / 10, "valid_accuracy": valid, **scores}


def test_the_best_evaluation_by_each_number_is_kept_and_of_equals_the_first():
    course, _ = made()
    quality = [(2.0, 300.0), (2.5, 310.0), (2.5, 290.0), (math.nan, math.nan)]
    rows = [
        evaluation(step, valid, buffer_is=score, buffer_fid=fid, features_fixed=True)
        for step, (valid, (score, fid)) in enumerate(
            zip((0.3, 0.5, 0.5, 0.4), quality, strict=True)
        )
    ]
    # Sample quality may be due more rarely than accuracy, there may be no validation images, and
    # scores by a network that changes have no best.
    rows += [evaluation(4, 0.1), evaluation(5, None)]
    rows.append(evaluation(6, 0.1, buffer_is=9.0, buffer_fid=0.0, features_fixed=False))
    best = [True, True, False, False, False, False, False]
    assert [course.see_evaluation(row) for row in rows] == best
    assert {name: row["step"] for name, row in course.best.items()} == {
        "valid_accuracy": 1,
        "buffer_is": 1,
        "buffer_fid": 2,
    }
    assert course.best["valid_accuracy"] == rows[1]
    assert course.accuracy == {step: step / 10 for step in range(7)}
    assert course.last_accuracy() == 0.6
    assert course.results([], {}, None)["best_evaluations"] == course.best


def test_results_of_a_lost_run_do_not_hide_what_is_not_finite():
    course, _ = made(before=1, after=1)
    course.accuracy.update({0: 0.1, 2: 0.9, 3: 0.8, 4: 0.3, 5: 0.1})
    rows = [
        {"step": i, "grad_scale": value, "ess": 0.5, "energy_gap": gap}
        for i, (value, gap) in enumerate([(0.9, 2e4), (0.1, -2.0), (0.2, 3.0)])
    ]
    results = course.results(rows, {"WARN": {"step": 3, "rule": "r"}}, 4)
    around = [(2, 0.9), (3, 0.8), (4, 0.3)]
    expected = {
        "accuracy": 0.1,
        "best_accuracy": 0.9,
        "best_accuracy_step": 2,
        "median_abs_gap_last_100": 3,
        "grad_scale": 0.2,
        "grad_scale_median_last_100": 0.2,
        "reference_ess": None,
        "first_warn": {"accuracy_around": around, "step": 3, "rule": "r"},
        "accuracy_around_divergence": [(3, 0.8), (4, 0.3), (5, 0.1)],
    }
    assert {name: results[name] for name in expected} == expected
    assert "first_error" not in results
    rows = [{"grad_scale": math.nan, "energy_gap": gap} for gap in (1.0, math.nan, 2.0)]
    results = course.results(rows, {}, None)
    assert math.isnan(results["median_abs_gap_last_100"])
    assert math.isnan(results["grad_scale_median_last_100"])


def test_a_rollback_gives_up_what_came_after_the_step_it_goes_back_to():
    course, _ = made(before=20, after=5)
    course.accuracy.update({step: step / 1000 for step in (0, 50, 60, 100, 119, 120)})
    alerts = {"ERROR": {"step": 119}}
    course.roll_back(60, alerts)
    # That of step 60 is of the parameters that were restored.
    assert course.accuracy == {0: 0.0, 50: 0.05, 60: 0.06}
    results = course.results([], alerts, None)
    assert results["first_error"]["accuracy_around"] == [(100, 0.1), (119, 0.119), (120, 0.12)]


SMALL: dict[str, Any] = {
    "iterations": 30,
    "steps_per_epoch": 10,
    "train_images": 640,
    "depth": 10,
    "width": 1,
}


def changed(path, change):
    """The run with another config.json."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return load_run(path)


def test_a_run_that_is_over(tmp_path):
    """What tables show of runs is in studies/jem_tables.md."""
    alerts = [
        {"level": "WARN", "step": 3, "rule": "energy_blowup"},
        {"level": "ERROR", "step": 9, "rule": "nonfinite"},
        {"level": "ERROR", "step": 7, "rule": "energy_blowup"},
    ]
    path = write_run(tmp_path / "x", alerts=alerts, samples=(20, 0, 10), **SMALL)
    (path / "samples" / "notes.npy").write_text("")
    run = load_run(path)
    assert run.state() == "finished 30 of 30 iterations"
    assert run.evaluations["step"].tolist() == [0, 10, 20, 30]
    assert set(run.evaluations["features"]) == {INCEPTION["features"]}
    assert (run.first_error, run.epoch(25)) == (alerts[2], 2.5)
    assert list(run.grids()) == [0, 10, 20]
    assert changed(path, lambda c: c.update(precision="bfloat16")).network == "WRN-10-1, bfloat16"
    # Results of a shorter run are not those of the longer one.
    longer = changed(path, lambda config: config["settings"].update(iterations=60))
    assert (longer.results, longer.steps, longer.complete) == (None, 30, False)
    run = load_run(write_run(tmp_path / "lost", diverged_at=12, steps=20, **SMALL))
    assert (run.complete, run.state()) == (True, "diverged at step 12 (epoch 1.2)")


def test_a_run_in_progress_with_torn_lines_or_lost(tmp_path):
    path = write_run(tmp_path / "x", finished=False, steps=17, **SMALL)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (path / name).open("a") as lines:
            lines.write('{"step": 9')
    run = load_run(path)
    assert (run.results, run.complete, run.diverged_at) == (None, False, None)
    assert run.state() == "stopped or still running, 17 of 30 iterations"
    assert run.evaluations["step"].tolist() == [0, 10]
    assert series(run.path, ["energy_gap"])[0].tolist() == list(range(17))
    (path / "evaluations.jsonl").unlink()
    # 640 images in batches of 64; the evaluations do not say yet.
    assert load_run(path).steps_per_epoch == 10
    for name in ("metrics.jsonl", "alerts.jsonl"):
        (path / name).unlink()
    begun = load_run(path)
    assert (begun.steps, begun.first_error, begun.grids()) == (0, None, {})
    assert begun.evaluations.empty
    rows = [{"step": step, "cross_entropy": 1.0} for step in range(11)]
    rows += [{"step": step, "p_x_y/energy_gap": math.inf} for step in range(11, 17)]
    write_lines(path / "metrics.jsonl", rows)
    run = load_run(path)
    assert (run.complete, run.steps, run.diverged_at) == (False, 17, 11)
    told = "diverged at step 11 (epoch 1.1); stopped or still running, 17 of 30 iterations"
    assert run.state() == told


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
        ({"clip_norm": 1.0}, ["clip norm 1.0, not None"]),
        ({"action": "rollback"}, ["action rollback, not warn"]),
        ({"activation": "silu", "norm": "batch"}, ["silu, not leaky_relu", "batch, not none"]),
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
