from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.report.plots import Axis, short_number


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


def test_an_axis_ends_where_lost_runs_would_flatten_the_rest():
    axis = Axis.around("symlog", [0.1, -0.2, 3e20])
    assert axis.at(3e20) == axis.at(1e7) == 1.0
    assert 0 < axis.at(0.1) < 0.3
    assert Axis.around("symlog", [1e8, 1e20]).at(1e8) <= 1.0
