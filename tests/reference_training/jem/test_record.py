from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.alerts import Alert, Level
from ebmguard.reference_training.jem.record import RunRecord, last_course


def alert(level, step):
    return Alert("energy_blowup", level, step, "energy_gap", 50.0, 20.0, 100, ("a", "b"))


@pytest.mark.parametrize("gap", [1.1e4, -1.1e4, math.nan, math.inf])
def test_diverges_at_the_first_lost_step(gap):
    record = RunRecord()
    assert not record.see_step(3, 0.5, 9.9e3)
    assert record.see_step(4, 0.5, gap)
    assert not record.see_step(5, 0.5, gap)
    assert record.diverged_at == 4


@pytest.mark.parametrize("gap", [1.0, None])
def test_a_classifier_that_is_lost_is_a_divergence_too(gap):
    record = RunRecord()
    assert not record.see_step(0, 900.0, gap)
    assert record.see_step(1, math.nan, gap)
    assert record.diverged_at == 1
    assert list(record.gaps) == ([] if gap is None else [gap, gap])


def evaluation(step, valid, **scores):
    return {"step": step, "test_accuracy": step / 10, "valid_accuracy": valid, **scores}


def test_the_best_evaluation_by_each_number_is_kept_and_of_equals_the_first():
    record = RunRecord()
    quality = [(2.0, 300.0), (2.5, 310.0), (2.5, 290.0), (math.nan, math.nan)]
    rows = [
        evaluation(step, valid, buffer_is=score, buffer_fid=fid, features_fixed=True)
        for step, (valid, (score, fid)) in enumerate(
            zip((0.3, 0.5, 0.5, 0.4), quality, strict=True)
        )
    ]
    # Sample quality may be due more rarely than accuracy.
    rows.append(evaluation(4, 0.1))
    assert [record.see_evaluation(row) for row in rows] == [True, True, False, False, False]
    assert {name: row["step"] for name, row in record.best.items()} == {
        "valid_accuracy": 1,
        "buffer_is": 1,
        "buffer_fid": 2,
    }
    assert record.best["valid_accuracy"] == rows[1]
    assert record.accuracy == {step: step / 10 for step in range(5)}
    assert record.results([], before=0, after=0)["best_evaluations"] == record.best


def test_scores_by_a_network_that_changes_have_no_best():
    record = RunRecord()
    row = evaluation(0, 0.3, buffer_is=2.0, buffer_fid=1.0, features_fixed=False)
    assert record.see_evaluation(row)
    assert list(record.best) == ["valid_accuracy"]


def test_without_validation_images_nothing_is_best_by_them():
    record = RunRecord()
    assert not record.see_evaluation(evaluation(0, None))
    assert record.best == {}
    assert record.accuracy == {0: 0.0}


def test_best_accuracy_is_from_before_the_divergence():
    record = RunRecord()
    assert record.best_accuracy() is None
    record.accuracy.update({0: 0.1, 50: 0.9, 100: 0.95, 150: 0.95, 200: 0.99})
    assert record.best_accuracy() == (200, 0.99)
    record.diverged_at = 160
    assert record.best_accuracy() == (100, 0.95)
    assert record.last_accuracy() == 0.99


def test_keeps_the_first_alert_of_each_level():
    record = RunRecord()
    seen = [
        record.see_alert(alert(Level[name], step))
        for name, step in (("INFO", 1), ("WARN", 2), ("WARN", 3), ("ERROR", 4), ("ERROR", 5))
    ]
    assert seen == [False, True, False, True, False]
    assert {level: a["step"] for level, a in record.alerts.items()} == {"WARN": 2, "ERROR": 4}
    record = RunRecord()
    assert record.see_alert(alert(Level.ERROR, 7))  # no warning before: it is the first of both
    assert not record.see_alert(alert(Level.WARN, 8))
    assert {level: a["step"] for level, a in record.alerts.items()} == {"WARN": 7, "ERROR": 7}


def test_results_of_a_lost_run():
    record = RunRecord(next_step=6)
    for step, gap in enumerate((1.0, -2.0, 3.0, 40.0, 2e4)):
        record.see_step(step, 0.5, gap)
    record.see_alert(alert(Level.WARN, 3))
    record.accuracy.update({0: 0.1, 2: 0.9, 3: 0.8, 4: 0.3, 5: 0.1})
    rows = [
        {"step": i, "grad_scale": value, "ess": 0.5, "energy_gap": 7.0}
        for i, value in enumerate([0.9, 0.1, 0.2])
    ]
    results = record.results(rows, before=1, after=1)
    assert results["diverged_at"] == 4
    assert results["accuracy"] == 0.1
    assert (results["best_accuracy"], results["best_accuracy_step"]) == (0.9, 2)
    assert results["median_abs_gap_last_100"] == 3
    assert results["grad_scale"] == 0.2
    assert results["grad_scale_median_last_100"] == 0.2
    assert results["reference_ess"] is None
    assert results["first_warn"]["step"] == 3
    assert results["first_warn"]["accuracy_around"] == [(2, 0.9), (3, 0.8), (4, 0.3)]
    assert results["first_error"] is None
    assert results["accuracy_around_divergence"] == [(3, 0.8), (4, 0.3), (5, 0.1)]


def test_medians_do_not_hide_what_is_not_finite():
    record = RunRecord()
    for step, gap in enumerate((1.0, math.nan, 2.0)):
        record.see_step(step, 0.5, gap)
    results = record.results([{"grad_scale": math.nan}], before=0, after=0)
    assert math.isnan(results["median_abs_gap_last_100"])
    assert math.isnan(results["grad_scale_median_last_100"])


def test_state_round_trip():
    record = RunRecord(next_step=7, elapsed=1.5)
    record.see_step(1, 0.5, 2e4)
    record.see_alert(alert(Level.ERROR, 1))
    record.see_evaluation(evaluation(1, 0.5))
    other = RunRecord()
    other.load_state_dict(record.state_dict())
    assert other == record


def test_a_rollback_gives_up_what_came_after_the_step_it_goes_back_to():
    record = RunRecord()
    for step in range(120):
        record.see_step(step, 0.1, float(step))
        record.next_step = step + 1
    assert record.see_step(120, 0.1, 2e4)
    record.next_step = 121
    record.accuracy.update({step: step / 1000 for step in (0, 50, 60, 100, 119, 120)})
    kept = record.accuracy
    record.see_alert(alert(Level.ERROR, 119))
    rollback = {"step": 120, "restored_step": 60, "message": "back"}
    record.see_rollback(rollback, before=20, after=5)
    assert record.next_step == 60
    assert record.diverged_at is None
    assert record.rollbacks == [rollback]
    assert record.attempt == {"attempt": 1}
    # That of step 60 is of the parameters that were restored. The object is the one that is shared.
    assert kept is record.accuracy
    assert kept == {0: 0.0, 50: 0.05, 60: 0.06}
    # Of the last 100 gaps, those of steps 21 to 120, the steps before 60 are left.
    assert list(record.gaps) == [float(step) for step in range(21, 60)]
    record.see_alert(alert(Level.ERROR, 119))
    results = record.results([], before=20, after=5)
    assert results["first_error"]["accuracy_around"] == [(100, 0.1), (119, 0.119), (120, 0.12)]
    again = RunRecord()
    again.load_state_dict(record.state_dict())
    assert again == record


def test_an_alert_of_a_later_attempt_says_so():
    record = RunRecord()
    record.see_rollback({"restored_step": 0}, before=1, after=1)
    record.see_alert(alert(Level.WARN, 7))
    assert record.alerts["WARN"]["attempt"] == 1


@given(st.lists(st.integers(0, 9), max_size=30))
def test_the_last_course_is_what_a_reader_with_an_array_would_keep(steps):
    rows = [{"step": step, "row": i} for i, step in enumerate(steps)]
    kept: dict[int, int] = {}
    for row in rows:
        kept = {step: i for step, i in kept.items() if step < row["step"]}
        kept[row["step"]] = row["row"]
    assert {row["step"]: row["row"] for row in last_course(rows)} == kept
    assert [row["step"] for row in last_course(rows)] == sorted(kept)
