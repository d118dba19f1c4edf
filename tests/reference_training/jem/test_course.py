"""Accuracy around alerts, and what results.json says: the best, the medians, and rollbacks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ebmguard.reference_training.jem.course import Course, Kept, why_lost


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


def test_steps_before_an_event_are_those_that_were_there():
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


def test_a_second_event_extends_the_watch_and_measures_nothing_twice():
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


def test_results_of_a_lost_run():
    course, _ = made(before=1, after=1)
    course.accuracy.update({0: 0.1, 2: 0.9, 3: 0.8, 4: 0.3, 5: 0.1})
    rows = [
        {"step": i, "grad_scale": value, "ess": 0.5, "energy_gap": gap}
        for i, (value, gap) in enumerate([(0.9, 2e4), (0.1, -2.0), (0.2, 3.0)])
    ]
    results = course.results(rows, {"WARN": {"step": 3, "rule": "r"}}, 4)
    assert results["accuracy"] == 0.1
    assert (results["best_accuracy"], results["best_accuracy_step"]) == (0.9, 2)
    assert results["median_abs_gap_last_100"] == 3
    assert results["grad_scale"] == 0.2
    assert results["grad_scale_median_last_100"] == 0.2
    assert results["reference_ess"] is None
    around = [(2, 0.9), (3, 0.8), (4, 0.3)]
    assert results["first_warn"] == {"accuracy_around": around, "step": 3, "rule": "r"}
    assert "first_error" not in results
    assert results["accuracy_around_divergence"] == [(3, 0.8), (4, 0.3), (5, 0.1)]


def test_medians_do_not_hide_what_is_not_finite():
    course, _ = made()
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
