"""The judge: hysteresis, rules of one's own, steps with several losses, members."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from ebmguard.alerts import DEFAULT_RULES, FloorRule, Judge, Level, Reading
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
