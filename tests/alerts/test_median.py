"""Rules on a median over a window, on synthetic shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ebmguard.alerts import DEFAULT_RULES, Bound, Judge, Level, MedianRule
from ebmguard.alerts.remedies import WEIGHTS
from ebmguard.errors import ConfigError

from .parts import feed, levels, make_row

RULE = next(rule for rule in DEFAULT_RULES if isinstance(rule, MedianRule))  # weights_degenerate


# -- weights_degenerate ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beta_star", "tag", "value"),
    [
        (2.0, "ess", 0.05),
        (2.0, "pareto_k", 0.9),
        (-2.0, "ess", 0.05),
        (0.0, "ref/ess", 0.05),
        (0.0, "ref/pareto_k", 0.9),
    ],
)
def test_degenerate_weights_warn_after_a_full_window(beta_star, tag, value):
    alerts = feed(RULE, [make_row(beta_star=beta_star) | {tag: value}] * 500)
    window = 50 if "ess" in tag else 5
    assert levels(alerts) == [(Level.WARN, window - 1)]
    assert (alerts[0].tag, alerts[0].value, alerts[0].window) == (tag, value, window)
    assert alerts[0].limit == (0.1 if "ess" in tag else 0.7)


GOOD, NOTHING = make_row(beta_star=2.0), {"nonfinite/gradients": 0.0}
FEW, HEAVY = (GOOD | own for own in ({"ess": 0.05}, {"pareto_k": 0.9}))
AT_ZERO = make_row(ref__ess=0.05)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Half a window of bad values is not enough.
        ([GOOD] * 50 + [FEW] * 25 + [GOOD] * 200, []),
        ([GOOD] * 50 + [FEW] * 26, [75]),
        ([GOOD] * 50 + [HEAVY] * 2 + [GOOD] * 200, []),
        ([GOOD] * 50 + [HEAVY] * 3, [52]),
        # A row without weights changes nothing, and undefined weights are left out.
        ([FEW] * 49 + [NOTHING], []),
        ([FEW] * 49 + [NOTHING, FEW], [50]),
        ([AT_ZERO] * 49 + [NOTHING, AT_ZERO], [50]),
        ([GOOD | {"ess": math.nan, "pareto_k": math.nan}] * 200 + [GOOD] * 200, []),
        # At beta* = 0 the weights themselves say nothing, and elsewhere the reference.
        ([make_row(ess=0.01, pareto_k=9.0)] * 200, []),
        ([GOOD | {"ref/ess": 0.01, "ref/pareto_k": 9.0}] * 200, []),
        ([AT_ZERO] * 49 + [FEW] * 49, []),
        # It is never an ERROR.
        ([GOOD | {"ess": 1 / 64, "pareto_k": 20.0}] * 3000, [4]),
    ],
)
def test_degenerate_weights_are_a_warning_at_most(rows, expected):
    assert levels(feed(RULE, rows)) == [(Level.WARN, step) for step in expected]


def test_the_episode_lasts_until_the_tighter_band():
    bound = replace(RULE.bounds[0], window=1)
    judge = Judge([replace(RULE, bounds=(bound,), calm_steps=2)])
    for step, ess in enumerate((0.05, 0.12, 0.2, 0.12, 0.2)):
        judge.observe(step, make_row(beta_star=2.0, ess=ess))
        assert judge.level is Level.WARN
    judge.observe(5, make_row(beta_star=2.0, ess=0.2))
    assert judge.level is None


# -- any bound ------------------------------------------------------------------------------


def rule_of(*bounds):
    return MedianRule("x", bounds=bounds)


def test_the_worst_of_several_bounds_speaks():
    note = Bound("a", "above", 1.0, 0.5, 3, WEIGHTS, Level.INFO)
    warning = Bound("b", "below", -1.0, -0.5, 3, WEIGHTS)
    rule = rule_of(note, warning)
    assert levels(feed(rule, [{"a": 2.0}] * 3000)) == [(Level.INFO, 2)]
    (alert,) = feed(rule, [{"a": 2.0, "b": -2.0}] * 3000)
    assert (alert.tag, alert.level, alert.step) == ("b", Level.WARN, 2)


def test_an_info_is_said_once_and_makes_nothing_active():
    judge = Judge([rule_of(Bound("a", "above", 1.0, 0.5, 1, WEIGHTS, Level.INFO))])
    rows = ([{"a": 2.0}] * 20 + [{"a": 0.0}] * 1000) * 3
    assert levels(feed(judge, [*rows, {"a": 2.0}])) == [(Level.INFO, 0)]
    assert (judge.active, judge.level) == ({}, None)


def test_an_info_does_not_hold_back_a_warning():
    rule = rule_of(
        Bound("a", "above", 1.0, 0.5, 1, WEIGHTS, Level.INFO),
        Bound("a", "above", 3.0, 0.5, 1, WEIGHTS),
    )
    alerts = feed(rule, [{"a": 2.0}, {"a": 4.0}, {"a": 2.0}])
    assert levels(alerts) == [(Level.INFO, 0), (Level.WARN, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"clear": 2.0},
        {"side": "below"},
        {"window": 0},
        {"level": Level.ERROR},
    ],
)
def test_a_bound_that_contradicts_itself_is_refused(wrong):
    bound = Bound("a", "above", 1.0, 0.5, 3, WEIGHTS)
    with pytest.raises(ConfigError, match="Bound of 'a'"):
        replace(bound, **wrong)
