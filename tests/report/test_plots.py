"""Charts: the bins of a series, what is read of a row, the limits of the rules, and axes."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.alerts import DEFAULT_RULES, Bands, FloorRule, GrowthRule, Level, MedianRule
from ebmguard.report.bins import BinnedSeries
from ebmguard.report.folder import value_of
from ebmguard.report.plots import Axis, short_number

from .folders import rows

VALUES = st.lists(st.floats(width=32), min_size=1, max_size=300)


def binned(values: list[float], capacity: int, batch: int = 1) -> BinnedSeries:
    series = BinnedSeries(capacity)
    for start in range(0, len(values), batch):
        part = values[start : start + batch]
        series.extend(range(start, start + len(part)), part)
    return series


@given(VALUES, st.integers(1, 40), st.integers(1, 300))
def test_bins_hold_the_extremes_of_their_stretch_and_their_steps(values, capacity, batch):
    series = binned(values, capacity, batch)
    assert len(series.bins) <= capacity
    starts = [own.step for own in series.bins] + [len(values)]
    for own, start, end in zip(series.bins, starts, starts[1:], strict=False):
        part = values[start:end]
        finite = [value for value in part if math.isfinite(value)]
        assert own.is_gap == (not finite)
        if finite:
            assert (own.low, own.high) == (min(finite), max(finite))
            assert own.last == finite[-1]
            assert values[own.low_at] == own.low
            assert values[own.high_at] == own.high
            assert start <= min(own.low_at, own.high_at) <= max(own.low_at, own.high_at) < end
        bad = [i for i in range(start, end) if not math.isfinite(values[i])]
        assert own.bad_at == (bad[0] if bad else None)


# -- values and limits -----------------------------------------------------------------------------


def test_at_beta_star_zero_weights_are_those_of_the_reference():
    row = {"beta_star": 0.0, "ess": 1.0, "ref/ess": 0.3, "energy_gap": 2.0}
    assert value_of(row, "ess") == 0.3
    assert value_of(row | {"beta_star": 0.5}, "ess") == 1.0
    assert value_of(row, "energy_gap") == 2.0
    assert value_of(row, "pareto_k") is None


def test_a_moving_band_is_growth_over_the_runs_own_past():
    bands, rule = Bands(), next(rule for rule in DEFAULT_RULES if isinstance(rule, GrowthRule))
    assert isinstance(rule, GrowthRule)
    sizes: list[float] = []
    spreads: list[float] = []
    for step, row in rows(range(6 * rule.rows), seed=5):
        limits, spread = bands.read(row)["energy_gap"], row["f_pos/std"]
        start = max(0, step - 5 * rule.rows // 2)
        past = slice(start, max(1, step - rule.rows // 2))
        usual = max(rule.unit, median(spreads[past] or [spread]))
        warn = error = rule.spreads * math.sqrt(usual * max(usual, spread))
        if step > 2 * rule.rows:  # no sampler witnesses a blow-up
            record = max(sizes[past]) + rule.unit
            warn, error = (
                min(error, record * math.exp(x * rule.growth) - rule.unit - spread) for x in (1, 2)
            )
            assert limits == pytest.approx((-warn, warn, -error, error))
        sizes.append(abs(row["energy_gap"]) + spread)
        spreads.append(spread)


def test_fixed_limits_are_the_rules_own():
    limits = Bands().limits
    for rule in DEFAULT_RULES:
        if isinstance(rule, FloorRule):
            assert limits[rule.tag].low == rule.floor
        if isinstance(rule, MedianRule):
            for bound in rule.bounds:
                if bound.level is Level.WARN:
                    found = limits[bound.tag]
                    assert bound.limit == (found.high if bound.side == "above" else found.low)


# -- axes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.25, "0.25"),
        (1500.0, "1500"),
        (1e4, "1e4"),
        (12345.0, "1.23e4"),
        (-3e-9, "-3e-9"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value, text):
    assert short_number(value) == text


@given(
    st.sampled_from(["linear", "log", "symlog", "share"]),
    st.lists(st.floats(-1e9, 1e9, width=32), min_size=1),
)
def test_axes_keep_the_order_and_have_round_ticks_inside(scale, values):
    axis = Axis.around(scale, values)
    heights = [axis.at(value) for value in sorted(values)]
    assert heights == sorted(heights)
    assert 0 <= heights[0] <= heights[-1] <= 1
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))
    slack = 1e-9 * (axis.high - axis.low)
    assert axis.low - slack <= ticks[0] <= ticks[-1] <= axis.high + slack


def test_ticks_of_many_powers_are_every_second_one():
    ticks = Axis.around("log", [1e-3, 1e3]).ticks()
    assert ticks == pytest.approx([1e-3, 1e-1, 10, 1e3])
    assert Axis("log", 1.0, 1e3).ticks() == [1, 10, 100, 1000]  # both ends are powers


def test_an_axis_ends_where_lost_runs_would_flatten_the_rest():
    axis = Axis.around("symlog", [0.1, -0.2, 3e20])
    assert axis.at(3e20) == axis.at(1e7) == 1.0
    assert 0 < axis.at(0.1) < 0.3
    assert Axis.around("symlog", [1e8, 1e20]).at(1e8) <= 1.0
