"""Rules on a median against the standard library's median of everything."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.alerts import Bound, Judge, Level, MedianRule
from ebmguard.alerts.remedies import WEIGHTS
from ebmguard.errors import ConfigError

# Few distinct values make ties, also with the limits; wide floats every order of magnitude.
VALUES = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-1e100, 1e100, width=64),
    st.sampled_from([math.nan, math.inf, -math.inf]),  # which are not counted
)


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
        assert reading.level is (Level.WARN if sign * median > sign * limit else None)
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
    state["rules"]["m"]["watcher"]["windows"] = [[math.nan]]
    with pytest.raises(ConfigError, match=r"'m' is damaged.*finite"):
        judge.load_state_dict(state)
    assert judge.state_dict() == before
