"""Rules on a median over a window, on synthetic shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ebmguard.alerts import DEFAULT_RULES, Bound, Detector, Level, MedianRule
from ebmguard.alerts.words import WEIGHTS as WORDS
from ebmguard.errors import ConfigError

RULES = {rule.name: rule for rule in DEFAULT_RULES if isinstance(rule, MedianRule)}
WEIGHTS = RULES["weights_degenerate"]
NAN = math.nan


def run(rule, rows):
    detector = Detector([rule])
    return [alert for step, row in enumerate(rows) for alert in detector.observe(step, row)]


def levels(alerts):
    return [(alert.level, alert.step) for alert in alerts]


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
def test_degenerate_weights_warn_after_a_full_window(make_row, beta_star, tag, value):
    alerts = run(WEIGHTS, [make_row(beta_star=beta_star) | {tag: value}] * 500)
    window = 50 if "ess" in tag else 5
    assert levels(alerts) == [(Level.WARN, window - 1)]
    assert (alerts[0].tag, alerts[0].value, alerts[0].window) == (tag, value, window)
    assert alerts[0].limit == (0.1 if "ess" in tag else 0.7)


@pytest.mark.parametrize(("tag", "value", "half"), [("ess", 0.05, 25), ("pareto_k", 0.9, 2)])
def test_half_a_window_of_bad_values_is_not_enough(make_row, tag, value, half):
    bad, good = make_row(beta_star=2.0) | {tag: value}, make_row(beta_star=2.0)
    assert run(WEIGHTS, [good] * 50 + [bad] * half + [good] * 200) == []
    assert len(run(WEIGHTS, [good] * 50 + [bad] * (half + 1))) == 1


@pytest.mark.parametrize("beta_star", [0.0, 2.0])
def test_a_row_without_weights_changes_nothing(make_row, beta_star):
    low = {"ess": 0.05, "ref/ess": 0.05}
    rows = [make_row(beta_star=beta_star) | low] * 49
    empty = {"nonfinite/gradients": 0.0}
    assert run(WEIGHTS, [*rows, empty]) == []
    assert len(run(WEIGHTS, [*rows, empty, rows[0]])) == 1


@pytest.mark.parametrize("tag", ["ess", "pareto_k"])
def test_undefined_weights_are_left_out(make_row, tag):
    rows = [make_row(beta_star=2.0) | {tag: value} for value in (NAN, 0.3) for _ in range(200)]
    assert run(WEIGHTS, rows) == []


def test_at_beta_zero_the_weights_themselves_say_nothing(make_row):
    assert run(WEIGHTS, [make_row(ess=0.01, pareto_k=9.0)] * 200) == []
    assert run(WEIGHTS, [make_row(beta_star=2.0, ref__ess=0.01, ref__pareto_k=9.0)] * 200) == []


def test_a_schedule_that_leaves_zero_forgets_the_reference(make_row):
    rows = [make_row(ref__ess=0.01)] * 49 + [make_row(beta_star=2.0, ess=0.01)] * 49
    assert run(WEIGHTS, rows) == []


def test_it_is_never_an_error(make_row):
    rows = [make_row(beta_star=2.0, ess=1 / 64, pareto_k=20.0)] * 3000
    assert levels(run(WEIGHTS, rows)) == [(Level.WARN, 4)]


def test_the_episode_lasts_until_the_tighter_band(make_row):
    bound = replace(WEIGHTS.bounds[0], window=1)
    detector = Detector([replace(WEIGHTS, bounds=(bound,), calm_steps=2)])
    for ess, active in [(0.05, True), (0.12, True), (0.2, True), (0.12, True), (0.2, True)]:
        detector.observe(0, make_row(beta_star=2.0, ess=ess))
        assert (detector.level is Level.WARN) is active
    detector.observe(0, make_row(beta_star=2.0, ess=0.2))
    assert detector.level is None


# -- any bound ------------------------------------------------------------------------------


def rule_of(*bounds):
    return MedianRule("x", bounds=bounds)


def test_the_worst_of_several_bounds_speaks():
    note = Bound("a", "above", 1.0, 0.5, 3, WORDS, Level.INFO)
    warning = Bound("b", "below", -1.0, -0.5, 3, WORDS)
    rule = rule_of(note, warning)
    assert levels(run(rule, [{"a": 2.0}] * 3000)) == [(Level.INFO, 2)]
    (alert,) = run(rule, [{"a": 2.0, "b": -2.0}] * 3000)
    assert (alert.tag, alert.level, alert.step) == ("b", Level.WARN, 2)


def test_an_info_is_said_once_and_makes_nothing_active():
    detector = Detector([rule_of(Bound("a", "above", 1.0, 0.5, 1, WORDS, Level.INFO))])
    rows = ([{"a": 2.0}] * 20 + [{"a": 0.0}] * 1000) * 3
    alerts = [alert for step, row in enumerate(rows) for alert in detector.observe(step, row)]
    assert levels(alerts) == [(Level.INFO, 0)]
    detector.observe(0, {"a": 2.0})
    assert detector.active == {}
    assert detector.level is None


def test_an_info_does_not_hold_back_a_warning():
    rule = rule_of(
        Bound("a", "above", 1.0, 0.5, 1, WORDS, Level.INFO), Bound("a", "above", 3.0, 0.5, 1, WORDS)
    )
    alerts = run(rule, [{"a": 2.0}, {"a": 4.0}, {"a": 2.0}])
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
    bound = Bound("a", "above", 1.0, 0.5, 3, WORDS)
    with pytest.raises(ConfigError, match="Bound of 'a'"):
        replace(bound, **wrong)
