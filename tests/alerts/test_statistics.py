"""The rolling window against the standard library's median of everything."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.alerts.thresholds import RollingWindow
from ebmguard.errors import ConfigError

# Few distinct values make ties, wide floats make every order of magnitude.
VALUES = st.one_of(
    st.integers(-3, 3).map(float), st.floats(-1e100, 1e100, allow_nan=False, width=64)
)


@given(size=st.integers(1, 12), values=st.lists(VALUES, min_size=1, max_size=40))
def test_the_median_is_that_of_the_last_values(size, values):
    window = RollingWindow(size)
    for count, value in enumerate(values, 1):
        window.push(value)
        recent = values[max(0, count - size) : count]
        assert [*window] == recent
        assert len(window) == len(recent)
        expected = statistics.median(recent)
        assert window.median() == pytest.approx(expected, rel=1e-12, abs=1e-290)


def test_median_of_huge_values_does_not_overflow():
    assert RollingWindow(2, [1.7e308, 1.7e308]).median() == 1.7e308


def test_an_empty_window_has_no_median():
    window = RollingWindow(3)
    assert math.isnan(window.median())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused_and_change_nothing(value):
    window = RollingWindow(2, [1.0, 2.0])
    with pytest.raises(ConfigError, match="finite"):
        window.push(value)
    assert [*window] == [1.0, 2.0]


def test_a_window_without_room_is_refused():
    with pytest.raises(ConfigError, match="size is 0"):
        RollingWindow(0)
