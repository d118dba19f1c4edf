"""nonfinite, sampler_failing and the rules on medians, on synthetic shapes."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebmguard.alerts import (
    DEFAULT_RULES,
    Bound,
    CollapsedRule,
    FloorRule,
    Judge,
    Level,
    MedianRule,
    NonFiniteRule,
)
from ebmguard.alerts import Remedy as R
from ebmguard.alerts.remedies import WEIGHTS
from ebmguard.errors import ConfigError

from .parts import feed, levels, make_row

WARN, ERROR = Level.WARN, Level.ERROR
NAN = math.nan
WEIGHTS_RULE = next(rule for rule in DEFAULT_RULES if isinstance(rule, MedianRule))
GOOD, NOTHING = make_row(beta_star=2.0), {"nonfinite/gradients": 0.0}
LOW, UNKNOWN, BETWEEN = (GOOD | {"grad_scale": x} for x in (0.05, NAN, 0.15))
ONCE = [LOW] * 30 + [GOOD] * 30
FEW, HEAVY = (GOOD | own for own in ({"ess": 0.05}, {"pareto_k": 0.9}))
AT_ZERO = make_row(ref__ess=0.05)
BROKEN = [make_row(energy_gap=NAN)] * 100
NOTE = Bound("a", "above", 1.0, 1, WEIGHTS, Level.INFO)


@pytest.mark.parametrize(
    ("rule", "rows", "expected"),
    [
        # A run of NaN is one ERROR, and a later one another.
        (NonFiniteRule(), [*BROKEN, *[make_row()] * 250, *BROKEN], [(ERROR, 0), (ERROR, 350)]),
        (FloorRule(), [GOOD] * 30 + [LOW] * 300, [(WARN, 49), (ERROR, 229)]),
        (FloorRule(), ([LOW] * 19 + [GOOD]) * 30, []),
        # Between the floor and twice as much the count stands, and where it is unknown.
        (FloorRule(), [LOW] * 19 + [BETWEEN] * 100 + [LOW], [(WARN, 119)]),
        (FloorRule(), [LOW] * 10 + [UNKNOWN, {}] * 50 + [LOW] * 10, [(WARN, 119)]),
        # At beta* = 0 GradScale is M/(M+1) whatever the sampler does: the reference is read.
        (FloorRule(), [make_row(ref__grad_scale=0.0)] * 500, [(WARN, 19)]),
        (FloorRule(), [make_row(ref__grad_scale=0.0)] * 19 + [LOW] * 20, [(WARN, 38)]),
        # Recovery ends the episode; the cool-down holds.
        (FloorRule(), ONCE * 3, [(WARN, 19)]),
        (FloorRule(), ONCE + [GOOD] * 500 + ONCE, [(WARN, 19), (WARN, 579)]),
        # Half a window of bad values is not enough.
        (WEIGHTS_RULE, [GOOD] * 50 + [FEW] * 25 + [GOOD] * 200, []),
        (WEIGHTS_RULE, [GOOD] * 50 + [FEW] * 26, [(WARN, 75)]),
        (WEIGHTS_RULE, [GOOD] * 50 + [HEAVY] * 2 + [GOOD] * 200, []),
        (WEIGHTS_RULE, [GOOD] * 50 + [HEAVY] * 3, [(WARN, 52)]),
        # A row without weights changes nothing, and undefined weights are left out.
        (WEIGHTS_RULE, [FEW] * 49 + [NOTHING, FEW], [(WARN, 50)]),
        (WEIGHTS_RULE, [AT_ZERO] * 49 + [NOTHING, AT_ZERO], [(WARN, 50)]),
        (WEIGHTS_RULE, [GOOD | {"ess": NAN, "pareto_k": NAN}] * 200 + [GOOD] * 200, []),
        # At beta* = 0 the weights themselves say nothing, and elsewhere the reference.
        (WEIGHTS_RULE, [make_row(ess=0.01, pareto_k=9.0)] * 200, []),
        (WEIGHTS_RULE, [GOOD | {"ref/ess": 0.01, "ref/pareto_k": 9.0}] * 200, []),
        (WEIGHTS_RULE, [AT_ZERO] * 49 + [FEW] * 49, []),
        # It is never an ERROR.
        (WEIGHTS_RULE, [GOOD | {"ess": 1 / 64, "pareto_k": 20.0}] * 3000, [(WARN, 4)]),
        # An INFO does not hold back a warning.
        (
            MedianRule("x", (NOTE, Bound("a", "above", 3.0, 1, WEIGHTS))),
            [{"a": 2.0}, {"a": 4.0}, {"a": 2.0}],
            [(Level.INFO, 0), (WARN, 1)],
        ),
    ],
)
def test_rules_fire_after_their_patience(rule, rows, expected):
    assert levels(feed(rule, rows)) == expected


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        *(("nonfinite/energies", 1 / 128), ("nonfinite/energies", NAN), ("nonfinite/samples", 0.5)),
        *(("nonfinite/neg", 1.0), ("nonfinite/gradients", 1.0), ("energy_gap", NAN)),
        *(("f_neg/median", -math.inf), ("sampler/grad_norm_max", math.inf)),
    ],
)
def test_anything_not_finite_is_an_error_at_once(tag, value):
    (alert,) = feed(NonFiniteRule(), [make_row() | {tag: value}])
    assert (alert.level, alert.step, alert.tag) == (Level.ERROR, 0, tag)
    assert alert.value == pytest.approx(value, nan_ok=True)
    assert alert.remedies[0].startswith("go back")


@pytest.mark.parametrize(
    ("beta_star", "tag", "first"),
    [
        (2.0, "grad_scale", "more SGLD steps"),
        (0.0, "ref/grad_scale", "more SGLD steps"),
        (-0.5, "grad_scale", "fewer SGLD steps"),
    ],
)
def test_the_alert_names_what_was_read_and_what_helps_at_its_beta(beta_star, tag, first):
    row = make_row(beta_star=beta_star) | {tag: 0.01}
    alerts = feed(FloorRule(), [row] * 200)
    assert [alert.window for alert in alerts] == ([20, 200] if beta_star else [20])
    for alert in alerts:
        assert (alert.tag, alert.value, alert.limit) == (tag, 0.01, 0.1)
        assert alert.remedies[0] == first


def test_the_episode_lasts_until_ten_rows_in_a_row_are_within_the_limit():
    bound = replace(WEIGHTS_RULE.bounds[0], window=1)
    judge = Judge([replace(WEIGHTS_RULE, bounds=(bound,))])
    for step, ess in enumerate((0.05, *[0.2] * 9, 0.05, *[0.12] * 9)):
        judge.observe(step, make_row(beta_star=2.0, ess=ess))
        assert judge.active == {"weights_degenerate": WARN}
    judge.observe(20, make_row(beta_star=2.0, ess=0.2))
    assert judge.active == {}


def test_the_worst_of_several_bounds_speaks():
    warning = Bound("b", "below", -1.0, 3, WEIGHTS)
    rule = MedianRule("x", (replace(NOTE, window=3), warning))
    assert levels(feed(rule, [{"a": 2.0}] * 3000)) == [(Level.INFO, 2)]
    (alert,) = feed(rule, [{"a": 2.0, "b": -2.0}] * 3000)
    assert (alert.tag, alert.level, alert.step) == ("b", WARN, 2)


def test_an_info_is_said_once_and_makes_nothing_active():
    judge = Judge([MedianRule("x", (NOTE,))])
    rows = ([{"a": 2.0}] * 20 + [{"a": 0.0}] * 1000) * 3
    assert levels(feed(judge, [*rows, {"a": 2.0}])) == [(Level.INFO, 0)]
    assert judge.active == {}


@pytest.mark.parametrize(
    ("rule", "wrong", "said"),
    [
        (FloorRule(), {"error_patience": 1}, "warn_patience"),
        (CollapsedRule(), {"share": 1.0}, "share"),
        (NOTE, {"window": 0}, "Bound of 'a'"),
        (NOTE, {"level": ERROR}, "Bound of 'a'"),
    ],
)
def test_what_contradicts_itself_is_refused(rule, wrong, said):
    with pytest.raises(ConfigError, match=said):
        replace(rule, **wrong)


CONSTANT = make_row(energy_gap=1e-4, f_pos__std=3e-4)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # A constant, of a run that told samples apart by 0.5, after 3/4 of 40 rows.
        ([make_row(f_pos__std=0.5)] * 60 + [CONSTANT] * 60, [(ERROR, 89)]),
        ([make_row(f_pos__std=0.5)] * 60 + [CONSTANT] * 29 + [make_row()] * 60, []),
        # The oldest of the 40 counts as the others do.
        (
            [make_row(f_pos__std=0.5)] * 60
            + [CONSTANT]
            + [make_row(f_pos__std=0.5)] * 10
            + [CONSTANT] * 29,
            [(ERROR, 99)],
        ),
        # Small, but not by so much; a head that starts at 0; a beginning that is just large.
        ([make_row(f_pos__std=0.5)] * 60 + [make_row(f_pos__std=0.01)] * 200, []),
        ([make_row(energy_gap=0.0, f_pos__std=0.0)] * 200, []),
        ([make_row(f_pos__std=1e4)] * 15 + [make_row()] * 200, []),
        # Within its first rows, where only rounding errors are left.
        ([make_row()] * 5 + [make_row(energy_gap=0.0, f_pos__std=1e-7)] * 60, [(ERROR, 34)]),
    ],
)
def test_a_network_that_became_a_constant_has_collapsed(rows, expected):
    alerts = feed(CollapsedRule(), rows)
    assert levels(alerts) == expected
    remedies = R.ROLL_BACK, R.SUBSTEPS, R.LOWER_LR, R.LOWER_BETA
    assert all(a.remedies == remedies for a in alerts)


# -- medians, against the standard library's of everything ----------------------------------------

# Few distinct values make ties, also with the limits; wide floats every order of magnitude.
VALUES = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-1e100, 1e100, width=64),
    st.sampled_from([NAN, math.inf, -math.inf]),  # which are not counted
)


@example(size=1, values=[2.0], side="above", limit=2.0)
@example(size=1, values=[2.0], side="below", limit=2.0)
@given(
    size=st.integers(1, 12),
    values=st.lists(VALUES, min_size=1, max_size=40),
    side=st.sampled_from(["above", "below"]),
    limit=st.integers(-3, 3).map(float),
)
def test_the_median_is_that_of_the_last_finite_values(size, values, side, limit):
    sign = 1 if side == "above" else -1
    watcher = MedianRule("m", (Bound("x", side, limit, size, WEIGHTS),)).watcher()
    for count, value in enumerate(values, 1):
        reading = watcher.read({"x": value})
        recent = [each for each in values[:count] if math.isfinite(each)][-size:]
        if len(recent) < size:
            assert (reading.level, reading.calm) == (None, None)
            continue
        median = statistics.median(recent)
        assert reading.level is (WARN if sign * median > sign * limit else None)
        assert reading.calm is (sign * median <= sign * limit)
        if reading.level is not None:
            assert reading.value == pytest.approx(median, rel=1e-12, abs=1e-290)


def test_the_median_of_huge_values_does_not_overflow():
    watcher = MedianRule("m", (Bound("x", "above", 1.0, 2, WEIGHTS),)).watcher()
    watcher.read({"x": 1.7e308})
    assert watcher.read({"x": 1.7e308}).value == 1.7e308


def test_a_saved_window_of_what_is_not_finite_is_refused_and_changes_nothing():
    judge = Judge([MedianRule("m", (Bound("x", "above", 1.0, 2, WEIGHTS),))])
    judge.observe(0, {"x": 0.2})
    before, state = judge.state_dict(), judge.state_dict()
    state["rules"]["m"]["watcher"]["windows"] = [[NAN]]
    with pytest.raises(ConfigError, match=r"'m' is damaged.*finite"):
        judge.load_state_dict(state)
    assert judge.state_dict() == before
