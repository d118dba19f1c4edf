from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.report.scales import Axis, number
from ebmguard.report.spark import sparkline
from ebmguard.report.thin import Bin, Thinned

VALUES = st.lists(st.floats(width=32), min_size=1, max_size=300)


def thinned(values: list[float], capacity: int) -> Thinned:
    series = Thinned(capacity)
    for step, value in enumerate(values):
        series.add(step, value)
    return series


@given(VALUES, st.integers(1, 40))
def test_bins_hold_the_extremes_of_their_stretch_and_their_steps(values, capacity):
    series = thinned(values, capacity)
    assert len(series.bins) <= capacity
    starts = [own.step for own in series.bins] + [len(values)]
    for own, start, end in zip(series.bins, starts, starts[1:], strict=False):
        part = values[start:end]
        finite = [value for value in part if math.isfinite(value)]
        assert own.is_gap == (not finite)
        if finite:
            assert (own.low, own.high) == (min(finite), max(finite))
            assert values[own.low_at] == own.low
            assert values[own.high_at] == own.high
            assert start <= min(own.low_at, own.high_at) <= max(own.low_at, own.high_at) < end
        bad = [i for i in range(start, end) if not math.isfinite(values[i])]
        assert own.bad_at == (bad[0] if bad else None)


@given(VALUES)
def test_nothing_is_lost_while_there_is_room(values):
    points = [point for own in thinned(values, 300).bins for point in own.points()]
    assert points == [(i, x) for i, x in enumerate(values) if math.isfinite(x)]


def test_points_come_in_the_order_of_steps():
    assert Bin(0, low=1.0, low_at=7, high=2.0, high_at=3).points() == [(3, 2.0), (7, 1.0)]


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
    assert number(value) == text


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


def test_a_spike_of_one_step_is_seen_in_a_sparkline_of_any_run():
    values = [0.5 + 0.01 * (i % 7) for i in range(20_000)]
    values[13_333] = 40.0
    (line,) = sparkline(thinned(values, 600).bins, "symlog", 30)
    assert len(line) == 30
    assert line[13_333 * 29 // 19_999] == "█"
    assert line.count("█") == 1


def test_a_sparkline_shows_shares_on_their_own_scale_and_marks_what_is_no_number():
    low = thinned([0.02] * 50, 600)
    assert sparkline(low.bins, "share", 10) == ["▁" * 10]
    lines = sparkline(thinned([1.0] * 50, 600).bins, "share", 10, height=2)
    assert lines == ["█" * 10, "█" * 10]
    broken = thinned([0.5] * 10 + [math.nan] * 10, 600)
    (line,) = sparkline(broken.bins, "share", 20)
    assert line == "▄" * 10 + "×" * 10
    # Every tenth step has a value: it holds in between.
    sparse = Thinned()
    for step in range(0, 100, 10):
        sparse.add(step, 0.5)
    assert sparkline(sparse.bins, "share", 50) == ["▄" * 50]
    assert sparkline([], "log", 3, height=2) == ["   ", "   "]


def test_an_axis_ends_where_lost_runs_would_flatten_the_rest():
    axis = Axis.around("symlog", [0.1, -0.2, 3e20])
    assert axis.at(3e20) == axis.at(1e7) == 1.0
    assert 0 < axis.at(0.1) < 0.3
    assert Axis.around("symlog", [1e8, 1e20]).at(1e8) <= 1.0
