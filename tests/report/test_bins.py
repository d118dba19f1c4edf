from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ebmguard.report.bins import Bin, BinnedSeries

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


@given(VALUES)
def test_nothing_is_lost_while_there_is_room(values):
    points = [point for own in binned(values, 300).bins for point in own.points()]
    assert points == [(i, x) for i, x in enumerate(values) if math.isfinite(x)]


def test_points_come_in_the_order_of_steps():
    assert Bin(0, low=1.0, low_at=7, high=2.0, high_at=3).points() == [(3, 2.0), (7, 1.0)]
