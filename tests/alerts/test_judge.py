"""The judge: hysteresis, rules of one's own, steps with several losses, members."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ebmguard.alerts import DEFAULT_RULES, FloorRule, Judge, Level, Reading, Verdict, VerdictTracker
from ebmguard.alerts.judge import Latch
from ebmguard.errors import ConfigError

from .parts import FAILED, WARNED, Slump, SlumpWatcher, excerpt, feed, levels, make_row, noise

INFO, WARN, ERROR = Level
LOW = make_row(beta_star=2.0, grad_scale=0.05)


# -- hysteresis ----------------------------------------------------------------------------------


def reports(latch, steps):
    """Indices of the observations that were reported; a step is (level, calm, value), the limit 1.

    Without a value it is 5.
    """
    readings = [
        Reading(level, calm, "x", value[0] if value else 5.0, 1.0) for level, calm, *value in steps
    ]
    return [i for i, reading in enumerate(readings) if latch.update(reading)]


BAD, WORSE, REST, BETWEEN = (WARN, False), (ERROR, False), (None, True), (None, False)
UNKNOWN = (None, None)


def worse(*values: float) -> list[tuple[Level, bool, float]]:
    return [(ERROR, False, value) for value in values]


HYSTERESIS: dict[str, tuple[list[tuple[Any, ...]], list[int]]] = {
    "a lasting level is reported once": ([BAD] * 1000, [0]),
    "an escalation at once, and only upwards": ([BAD, WORSE, BAD, WORSE, WORSE], [0, 1]),
    "within the limit, but not calm": ([BAD, *[BETWEEN] * 600, BAD], [0]),
    "too few calm rows": ([WORSE, *[*[REST] * 9, BETWEEN] * 9, WORSE], [0]),
    "enough calm rows": ([WORSE, *[REST] * 9, BETWEEN, *[REST] * 10, WORSE], [0, 21]),
    "unknown does not": ([WORSE, *[REST] * 5, UNKNOWN, *[REST] * 5, WORSE], [0, 12]),
    "held back, and then reported late": ([BAD, *[REST] * 10, *[BAD] * 600], [0, 500]),
    "an escalation does not wait": ([BAD, WORSE, *[REST] * 10] * 2, [0, 1, 13]),
    "the rest after an error covers warnings": ([WORSE, *[REST] * 10, BAD], [0]),
    "three times as large": ([*worse(5), *[BETWEEN] * 9, *worse(16)], [0, 10]),
    "even if it lasts": (worse(5, *[14] * 20, 16), [0, 21]),
    "not soon after": (worse(*[4.0**n for n in range(20)]), [0, 10]),
    "on either side": ([*worse(5), *[REST] * 9, *worse(-16), *[BAD] * 9, *worse(49)], [0, 10, 20]),
    "than the one reported last": (worse(5, *[16] * 20, *[40] * 20), [0, 10]),
    "nothing is worse than what is not finite": (
        [*worse(5), *[BETWEEN] * 9, *worse(math.nan), *[BETWEEN] * 9, *worse(math.inf, 1e300)],
        [0, 10],
    ),
    "what is bad because it is small": ([*worse(0.1), *[BETWEEN] * 9, *worse(0.9, 0.01)], [0]),
}


@pytest.mark.parametrize("name", HYSTERESIS)
def test_episodes_are_reported_once_and_end_when_all_is_calm(name):
    steps, reported = HYSTERESIS[name]
    assert reports(Latch(), steps) == reported
    for cut in range(min(len(steps), 20)):
        whole, resumed = Latch(), Latch()
        reports(whole, steps[:cut])
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        assert resumed == whole
        assert reports(resumed, steps[cut:]) == [i - cut for i in reported if i >= cut]


# -- what is active ------------------------------------------------------------------------------


def test_the_level_is_that_of_the_episodes_and_not_of_the_reports():
    judge = Judge()
    feed(judge, [make_row()] * 60)
    assert judge.active == {}
    judge.observe(60, make_row(energy_gap=WARNED))
    assert judge.observe(61, make_row(energy_gap=WARNED)) == []
    assert judge.active == {"energy_blowup": WARN}
    judge.observe(62, make_row(nonfinite__energies=0.1))
    assert max(judge.active.values()) is ERROR


def test_a_step_that_the_scaler_skipped_is_said_once_and_only_informs():
    judge = Judge()
    skipped = make_row(scaler__skipped=1.0)
    for step in range(3):
        (alert,) = judge.observe(step, skipped)
        assert (alert.rule, alert.level, alert.tag) == ("amp_skip", INFO, "scaler/skipped")
        assert judge.observe(step, skipped) == []
    assert judge.observe(3, make_row(scaler__skipped=0.0)) == []
    assert judge.active == {}


# -- rules of one's own --------------------------------------------------------------------------


class Odd(Slump):
    """A rule whose watcher, or what that reads, is of a wrong kind."""

    def watcher(self) -> Any:
        if self.name == "unfit":
            return None
        watcher: Any = SlumpWatcher(self)
        watcher.read = lambda row: "fine"
        return watcher


slump: Any = Slump


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (FloorRule(), "single rule"),
        (None, "sequence of rules"),
        (["nonfinite"], "'nonfinite' lacks name, watcher"),
        ([FloorRule], "is a class"),
        ([slump(name=3)], "has name=3"),
        ([slump(error=ValueError)], "has error=<class 'ValueError'>"),
        ([Odd(name="unfit")], "has a watcher None"),
        ([Odd()], "returned 'fine'"),
        ([FloorRule(), replace(FloorRule(), floor=0.01)], "different names"),
        ([Slump(name="amp_skip")], "none of them 'amp_skip'"),
    ],
)
def test_what_is_no_rule_is_refused(rules, said):
    with pytest.raises(ConfigError, match=said):
        Judge(rules)


# -- several losses in a step --------------------------------------------------------------------


def test_an_alert_of_a_loss_is_not_taken_back_and_its_memory_is():
    judge = Judge()
    feed(judge, [make_row()] * 60)
    (warned,) = judge.observe(60, make_row(energy_gap=WARNED))
    assert warned.level is WARN
    assert judge.observe(60, make_row(energy_gap=1.05 * WARNED)) == []
    (lost,) = judge.observe(60, make_row(nonfinite__energies=0.5))
    assert (lost.rule, judge.active) == ("nonfinite", {"nonfinite": ERROR})
    (raised,) = judge.observe(60, make_row(energy_gap=FAILED))
    assert (raised.rule, raised.level) == ("energy_blowup", ERROR)
    assert judge.observe(60, make_row()) == []
    assert judge.active == {}
    # As if nothing had been: it is said anew.
    assert levels(judge.observe(61, make_row(energy_gap=WARNED))) == [(WARN, 61)]


def test_after_a_restore_no_row_is_replaced():
    judge, restored = Judge([FloorRule()]), Judge([FloorRule()])
    feed(judge, [LOW] * 19)
    restored.load_state_dict(judge.state_dict())
    assert levels(restored.observe(18, LOW)) == [(WARN, 18)]
    assert pickle.loads(pickle.dumps(judge)).observe(18, LOW) == []  # is still in that step


# -- members of an ensemble ----------------------------------------------------------------------


def test_each_member_is_judged_as_if_it_were_alone():
    story = [row for name in ("absorbed_onset", "blowup_a") for row in excerpt(name).rows]
    quiet = noise(len(story), beta_star=2.0)
    judge = Judge(members=2)
    together = []
    for step, rows in enumerate(zip(story, quiet, strict=True)):
        mean = dict.fromkeys(rows[0], math.nan) | {
            "nonfinite/gradients": 0.0,
            "scaler/skipped": 0.0,
        }
        together += judge.observe(step, mean, rows)
    assert together == [replace(alert, member=0) for alert in feed(Judge(), story)]
    assert len(together) >= 1
    assert judge.active == {}


def test_what_no_member_has_is_judged_of_the_whole():
    judge = Judge(members=2)
    mean = {
        "beta_star": 0.5,
        "energy_gap": math.nan,
        "scaler/skipped": 1.0,
        "nonfinite/gradients": 1.0,
    }
    members = [{"beta_star": 0.5, "energy_gap": 0.0}, {"beta_star": 0.0, "energy_gap": math.nan}]
    found = [(alert.rule, alert.tag, alert.member) for alert in judge.observe(0, mean, members)]
    whole = [("amp_skip", "scaler/skipped", None), ("nonfinite", "nonfinite/gradients", None)]
    assert found == [*whole, ("nonfinite", "energy_gap", 1)]
    assert judge.active == {"nonfinite": ERROR}
    # The same step once more, with nothing new; and then without the members, who are left alone.
    assert judge.observe(0, mean, members) == []
    before = judge.state_dict()["members"]
    assert judge.observe(0, {"nonfinite/gradients": 0.0}) == []
    assert (judge.active, judge.state_dict()["members"]) == ({}, before)


def test_rows_of_other_members_are_refused():
    judge = Judge(members=2)
    with pytest.raises(ConfigError, match="2 members, but got 3"):
        judge.observe(0, make_row(), [make_row()] * 3)
    assert judge.state_dict() == Judge(members=2).state_dict()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (Judge(DEFAULT_RULES[:2], members=1).state_dict(), "same rules"),
        (Judge().state_dict(), "0 ensemble members"),
        (Judge(members=1).state_dict() | {"members": [3]}, "damaged"),
        ({}, "damaged"),
    ],
)
def test_a_state_of_another_judge_is_refused_and_changes_nothing(state, said):
    judge = Judge(members=1)
    judge.observe(0, make_row(), [make_row()])
    before = judge.state_dict()
    with pytest.raises(ConfigError, match=said):
        judge.load_state_dict(state)
    assert judge.state_dict() == before


# -- the verdict of a run, from rows that tell a story ---------------------------------------------


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
