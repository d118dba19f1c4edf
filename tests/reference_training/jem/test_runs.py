"""What a run keeps of its course, and what is read from the folders of runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from ebmguard.reference_training.jem.course import Course, why_lost
from ebmguard.reference_training.jem.runs import load_run
from tests.reference_training.jem.fabricate import write_run


def made(*, before=3, after=2):
    """A course whose measure is a number that tells the parameters apart, and its calls."""
    network, calls = nn.Linear(3, 2), []

    def measure():
        calls.append(network.weight.detach().sum().item())
        return calls[-1]

    return Course(network, measure, before, after), calls


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
