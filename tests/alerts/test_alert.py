"""The alert as data and in words; and the limits of single values, as rules say them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from ebmguard.alerts import (
    DEFAULT_RULES,
    Alert,
    Bands,
    FloorRule,
    Judge,
    Level,
    Limits,
    Reading,
    Remedy,
    Situation,
)
from ebmguard.alerts.remedies import Remedies, WordedRemedy, agreeing, contradict, recorded

from .parts import GROWTH, Slump, feed, make_row

ALERT = Alert(
    rule="energy_blowup",
    level=Level.ERROR,
    step=653,
    tag="energy_gap",
    value=3.6391,
    limit=3.1634,
    window=64,
    remedies=("roll back", "raise beta_star"),
)


def test_the_message_says_what_where_how_much_and_what_helps():
    assert ALERT.message == (
        "ERROR energy_blowup at step 653: energy_gap = 3.639 (limit 3.163 over the last 64 "
        "steps). Likeliest remedies: roll back; raise beta_star."
    )
    assert [int(level) for level in (Level.INFO, Level.WARN, Level.ERROR)] == [0, 1, 2]


def test_a_member_of_an_ensemble_is_named():
    alert = replace(ALERT, member=3)
    assert alert.message == ALERT.message.replace("step 653:", "step 653, member 3:")
    for each in (ALERT, alert, replace(ALERT, member=0)):
        record = json.loads(json.dumps(each.record()))
        assert (record["message"], record.get("member")) == (each.message, each.member)
        told = record | {"level": Level.ERROR, "remedies": tuple(record["remedies"])}
        assert Alert(**{name: x for name, x in told.items() if name != "message"}) == each
    assert "member" not in ALERT.record()


@pytest.mark.parametrize(
    ("change", "end"),
    [
        ({"remedies": (Remedy.LOWER_LR, "x")}, " Likeliest remedies: lower the learning rate; x."),
        ({"remedies": ()}, ""),
        ({"remedies": (), "follows": "nonfinite", "member": 2}, " Follows nonfinite."),
    ],
)
def test_what_helps_in_words_and_through_a_record(change, end):
    alert = replace(ALERT, **change)
    assert alert.message.endswith("(limit 3.163 over the last 64 steps)." + end)
    record = json.loads(json.dumps(alert.record()))
    assert record["remedies"] == [*alert.remedies]
    assert record.get("follows") == alert.follows
    assert ("follows" in record) == ("follows" in change)


# -- limits ---------------------------------------------------------------------------------------


def test_a_rule_of_ones_own_has_its_limits_drawn():
    bands = Bands((*DEFAULT_RULES, Slump(share=0.5)))
    assert bands.limits["accuracy"] == Limits(low=0.1)
    assert bands.level("accuracy", 0.4) is None
    # Half of the best so far, where that is more than the fixed limit.
    assert bands.read(make_row(accuracy=0.9))["accuracy"] == Limits(low=0.45)
    assert bands.limits["accuracy"] == Limits(low=0.45)
    assert bands.level("accuracy", 0.4) is Level.WARN
    assert bands.level("accuracy", math.nan) is Level.ERROR
    assert Bands((Slump(),)).read(make_row(accuracy=0.15))["accuracy"] == Limits(low=0.1)


def test_of_several_rules_the_narrowest_limits_hold():
    strict = replace(FloorRule(), name="strict", floor=0.15)
    for rules in ((FloorRule(), strict), (strict, FloorRule())):
        assert Bands(rules).limits == {"grad_scale": Limits(low=0.15)}
    narrow = replace(GROWTH, name="narrow", growth=GROWTH.growth / 2)
    one, both = Bands((narrow,)), Bands((GROWTH, narrow, GROWTH))
    for t in range(3 * GROWTH.rows):
        row = make_row(energy_gap=0.1 * (t % 3), sampler__grad_norm=0.2 + 0.1 * (t % 2))
        assert both.read(row) == one.read(row)
    assert math.isfinite(both.limits["energy_gap"].high)


# -- which remedies a run allows, which contradict each other, and what follows from an ERROR ------


R = Remedy


@pytest.mark.parametrize(
    ("remedy", "allowing", "forbidding"),
    [
        (R.RAISE_BETA, {"beta_star": 0.4, "most": 0.5}, {"beta_star": 0.5, "most": 0.5}),
        # Rounded in a row of float32, or of bfloat16.
        (R.RAISE_BETA, {"beta_star": 0.6, "most": 0.7}, {"beta_star": 0.69999, "most": 0.7}),
        (R.RAISE_BETA, {}, {"beta_star": 0.69922, "most": 0.7}),
        (R.RAISE_BETA, {"beta_star": math.nan, "most": 1.0}, {"beta_star": 9.0, "most": 8.0}),
        (R.LOWER_BETA, {"beta_star": 0.1}, {"beta_star": 0.0}),
        (R.TOWARDS_ZERO, {"beta_star": -0.1}, {"beta_star": 0.0}),
        (R.MORE_STEPS, {"samples_above": False}, {"samples_above": True}),
        (R.RAISE_BETA, {"samples_above": False}, {"samples_above": True}),
        (R.FEWER_STEPS, {"sgld_steps": 2}, {"sgld_steps": 1}),
        (R.LESS_NOISE, {"noise_std": 0.01}, {"noise_std": 0.0}),
        (R.ROLL_BACK, {}, {"rolls_back": True}),
    ],
)
def test_what_a_run_allows(remedy, allowing, forbidding):
    assert Situation().allows(remedy)  # nothing is known that speaks against it
    assert Situation(**allowing).allows(remedy)
    assert not Situation(**forbidding).allows(remedy)
    assert Situation(**forbidding).allows("words of a rule of one's own")


def test_opposites_are_opposites_of_each_other():
    pairs = {frozenset(pair) for pair in product(R, R) if contradict(*pair)}
    assert {R.RAISE_BETA, R.LOWER_BETA} in pairs
    assert {R.TOWARDS_ZERO, R.BELOW_ZERO} in pairs
    assert {R.MORE_STEPS, R.FEWER_STEPS} in pairs
    assert {R.LONGER_STEPS, R.FINER_STEPS} in pairs
    assert all(contradict(*pair) and contradict(*reversed(tuple(pair))) for pair in pairs)
    assert not any(contradict(remedy, "anything") for remedy in R)
    assert contradict("raise beta_star", "lower beta_star")  # of a record that was read


# -- consequences --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """Fires as a number of the row says: 1 for WARN, 2 for ERROR, -1 for INFO."""

    name: str

    def watcher(self) -> ToldWatcher:
        return ToldWatcher(self.name)


class ToldWatcher:
    def __init__(self, tag: str) -> None:
        self.tag = tag

    def read(self, row):
        value = row.get(self.tag, 0.0)
        if not value:
            return Reading(None, True)
        return Reading(Level(max(0, value)), False, self.tag, value, 0.0, 0, (R.LOWER_LR, "rest"))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state):
        pass


def followed(rows: list[dict[str, int]], judge: Judge | None = None, start: int = 0):
    """Of every alert rule, step, level and what it follows."""
    judge = judge or Judge([Told("a"), Told("b"), Told("c")])
    alerts = feed(judge, rows, start)
    assert all((alert.remedies == ()) == (alert.follows is not None) for alert in alerts)
    return [(alert.rule, alert.step, int(alert.level), alert.follows) for alert in alerts]


QUIET: dict[str, int] = {}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # While the ERROR of another rule goes on, whatever its place among the rules.
        ([{"b": 2}, {"a": 1, "b": 2}], [("b", 0, 2, None), ("a", 1, 1, "b")]),
        ([{"a": 2}, {"b": 2}, {"c": -1}], [("a", 0, 2, None), ("b", 1, 2, "a"), ("c", 2, 0, "a")]),
        # Not of a WARN, nor of an ERROR of the same step.
        ([{"a": 1}, {"b": 2}], [("a", 0, 1, None), ("b", 1, 2, None)]),
        ([{"a": 2, "b": 2}], [("a", 0, 2, None), ("b", 0, 2, None)]),
        # What had begun before is no consequence when it gets worse.
        (
            [{"b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 2}],
            [("b", 0, 1, None), ("a", 1, 2, None), ("b", 2, 2, None)],
        ),
        # Once the cause is over, a consequence that gets worse speaks for itself.
        (
            [{"a": 2}, *[{"b": 1}] * 11, {"b": 2}],
            [("a", 0, 2, None), ("b", 1, 1, "a"), ("b", 12, 2, None)],
        ),
        # As does new trouble.
        ([{"a": 2}, *[QUIET] * 10, {"b": 1}], [("a", 0, 2, None), ("b", 11, 1, None)]),
        # Of several, the one that follows from none.
        (
            [{"b": 2}, {"a": 2, "b": 2}, {"c": 1, "a": 2, "b": 2}],
            [("b", 0, 2, None), ("a", 1, 2, "b"), ("c", 2, 1, "b")],
        ),
    ],
)
def test_what_begins_during_an_error_follows_from_it(rows, expected):
    assert followed(rows) == expected
    for cut in range(len(rows)):  # through a checkpoint
        judge = Judge([Told("a"), Told("b"), Told("c")])
        first = followed(rows[:cut], judge)
        resumed = Judge([Told("a"), Told("b"), Told("c")])
        resumed.load_state_dict(json.loads(json.dumps(judge.state_dict())))
        assert first + followed(rows[cut:], resumed, cut) == expected


def test_members_have_consequences_of_their_own():
    judge = Judge([Told("a"), Told("b")], members=2)
    judge.observe(0, {}, [{"a": 2}, {}])
    alerts = judge.observe(1, {}, [{"a": 2, "b": 1}, {"b": 1}])
    assert [(alert.member, alert.follows) for alert in alerts] == [(0, "a"), (1, None)]


# -- after a rollback ----------------------------------------------------------------------------


def test_a_rollback_counts_the_steps_under_the_floor_anew():
    low = [make_row(beta_star=2.0, grad_scale=0.01)] * 60
    judge = Judge([FloorRule()])
    assert feed(judge, low[:19]) == []
    state = judge.state_dict()
    judge.load_state_dict(state)
    assert [alert.step for alert in feed(judge, low, 19)] == [19]  # as after a resume
    judge.load_state_dict(state)
    judge.after_rollback()
    assert [alert.step for alert in feed(judge, low, 19)] == [38]


def test_what_a_remedy_is_does_not_rest_on_its_words():
    """Through a record too: whatever it says, a run goes back once."""
    remedies = (
        WordedRemedy.of(R.ROLL_BACK, "back to step 5"),
        R.LOWER_LR,
        WordedRemedy.of(R.ROLL_BACK, "to 3"),
    )
    alert = Alert("a", Level.ERROR, 5, "a", 1.0, 0.5, 0, remedies)
    record = json.loads(json.dumps(alert.record()))
    assert record["remedies"] == ["back to step 5", "lower the learning rate", "to 3"]
    assert agreeing(recorded(record), {}) == ("back to step 5", "lower the learning rate")
    assert agreeing(recorded(record), {R.ROLL_BACK: 1}) == ("lower the learning rate",)
    alike = f"{R.ROLL_BACK}, or rather do not"
    assert agreeing([alike], {R.ROLL_BACK: 1}) == (alike,)
    for damaged in (None, 3, "x", [], ["NO_SUCH", 2, None, "ROLL_BACK"]):
        assert [*recorded(record | {"named": damaged})] == record["remedies"]


def test_remedies_go_by_the_sign_of_beta_star() -> None:
    remedies = Remedies(zero=("zero",), positive=("more",), negative=("less",))
    found = [*map(remedies.at, (-1.0, 0.0, 0.5, 1.0, math.nan))]
    assert found == [("less",), ("zero",), ("more",), ("more",), ("more",)]
