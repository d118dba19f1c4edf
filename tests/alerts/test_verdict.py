"""The verdict of a run, from rows that tell a story, and from a guard that lives one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from ebmguard.alerts import Judge, Level, Verdict, VerdictTracker

CALM, HUGE = (0.5, 1.0), (500.0, 1.0)
UNTRAINED, WILD, TRAINED = (0.02, 0.03), (-200.0, 10.0), (0.6, 1.5)
NAN = (math.nan, math.nan)


def told(*stretches: tuple[int, tuple[float, float]], overlap: float = 0.45) -> VerdictTracker:
    """After so many rows of a gap and a spread each; those of NaN have energies that are none."""
    judge, course = Judge(), VerdictTracker()
    rows = [pair for count, pair in stretches for _ in range(count)]
    for step, (gap, spread) in enumerate(rows):
        row = {"energy_gap": gap, "f_pos/std": spread, "energy_overlap": overlap}
        row["nonfinite/energies"] = float(gap != gap)
        alerts = judge.observe(step, row)
        worst = max(alerts, key=lambda alert: alert.level).rule if alerts else ""
        course.update(step, judge.level, worst)
        if step % 10:
            continue
        judge.load_state_dict(json.loads(json.dumps(judge.state_dict(), allow_nan=False)))
        course.load_state_dict(json.loads(json.dumps(course.state_dict(), allow_nan=False)))
    return course


@pytest.mark.parametrize(
    ("stretches", "verdict", "line"),
    [
        ([(200, CALM)], Verdict("healthy"), "healthy"),
        (
            [(100, CALM), (1, HUGE)],
            Verdict("lost", 100, "energy_blowup"),
            "lost since step 100 (energy_blowup)",
        ),
        # However long: a rule's own record takes in what it sees, the verdict does not.
        ([(100, CALM), (400, HUGE)], Verdict("lost", 100, "energy_blowup"), None),
        ([(300, NAN)], Verdict("lost", 0, "nonfinite"), None),
        ([(100, CALM), (5, HUGE), (9, CALM)], Verdict("lost", 100, "energy_blowup"), None),
        (
            [(100, CALM), (5, HUGE), (200, CALM)],
            Verdict("recovered", 114, "energy_blowup"),
            "recovered at step 114 (energy_blowup)",
        ),
        ([(100, CALM), (2, NAN), (200, CALM)], Verdict("recovered", 111, "nonfinite"), None),
        # The two rows of an untrained network are no range that a healthy run comes back to.
        ([(2, UNTRAINED), (1, WILD), (63, TRAINED)], Verdict("lost", 2, "energy_blowup"), None),
        (
            [(2, UNTRAINED), (1, WILD), (300, TRAINED)],
            Verdict("recovered", 66, "energy_blowup"),
            None,
        ),
        (
            [(100, CALM), (5, HUGE), (90, CALM), (50, HUGE)],
            Verdict("lost", 195, "energy_blowup"),
            None,
        ),
    ],
)
def test_verdicts(stretches: Sequence[tuple[int, tuple[float, float]]], verdict, line):
    found = told(*stretches).verdict
    assert found == verdict
    assert line is None or str(found) == line


@pytest.mark.parametrize("overlap", [0.1, math.nan])
def test_energies_that_do_not_touch_are_no_range_either(overlap):
    course = told((2, UNTRAINED), (1, WILD), (300, TRAINED), overlap=overlap)
    assert course.verdict == Verdict("lost", 2, "energy_blowup")


@pytest.mark.parametrize(("gap", "is_lost"), [(0.5, False), (6.0, True)])
def test_the_rows_in_which_a_run_blows_up_are_no_range_to_come_back_to(gap, is_lost):
    """Eight of them may precede the ERROR."""
    up = [(1, (size, 1.0)) for size in (2.0, 3.0, 5.0, 8.0)]
    course = told((100, CALM), *up, (5, HUGE), (200, (gap, 1.0)), overlap=0.05)
    assert course.verdict.is_lost is is_lost


def test_a_rollback_saves_until_the_next_error():
    course = VerdictTracker()
    for step, level in enumerate([0, 1, 2, 2]):
        course.update(step, level, {1: "stale_chains", 2: "energy_blowup"}.get(level, ""))
    assert course.verdict == Verdict("lost", 2, "energy_blowup")
    course.rolled_back(3, 1, "energy_blowup")
    assert str(course.verdict) == "saved by 3 rollbacks, the last to step 1 (energy_blowup)"
    course.update(1, Level.WARN, "stale_chains")
    assert str(course.verdict) == "look since step 1 after 3 rollbacks (stale_chains)"
    course.update(2, Level.INFO)
    assert course.verdict.name == "saved"
    course.update(3, Level.ERROR, "nonfinite")
    assert str(course.verdict) == "lost since step 3 after 3 rollbacks (nonfinite)"
    course.update(4, Level.INFO)
    assert course.verdict == Verdict("recovered", 4, "nonfinite", 3)
