from __future__ import annotations

import math

import pytest

from ebmguard.reference_training.toy.figures.spread import Spread
from ebmguard.reference_training.toy.figures.words import listed


@pytest.mark.parametrize(
    ("values", "median", "low", "high", "text"),
    [
        ([3.0, 1.0, 2.0], 2.0, 1.0, 3.0, "2 [1, 3]"),
        ([4.0, 1.0, 2.0, 3.0], 2.5, 1.0, 4.0, "2.5 [1, 4]"),
        ([0.5], 0.5, 0.5, 0.5, "0.5"),
        # One of three is lost: the median is the worse of the other two, and the loss shows.
        ([0.5, math.nan, 0.25], 0.5, 0.25, math.nan, "0.5 [0.25, undefined]"),
        ([math.inf, 1.0, 2.0], 2.0, 1.0, math.inf, "2 [1, ∞]"),
        ([math.nan, math.nan, 0.1], math.nan, 0.1, math.nan, "undefined [0.1, undefined]"),
        ([math.nan, math.nan], math.nan, math.nan, math.nan, "undefined"),
    ],
)
def test_median_and_range(values, median, low, high, text):
    spread = Spread.of(values)
    got = (spread.median, spread.low, spread.high)
    assert got == pytest.approx((median, low, high), nan_ok=True)
    assert str(spread) == text
    assert spread.undefined == math.isnan(median)


def test_a_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        Spread.of([])


def test_overlap_and_order():
    low, high = Spread.of([1.0, 2.0, 3.0]), Spread.of([4.0, 5.0, 6.0])
    touching, lost = Spread.of([3.0, 4.0, 5.0]), Spread.of([math.nan] * 3)
    assert not low.overlaps(high)
    assert low.overlaps(touching)
    assert touching.overlaps(high)
    # Undefined is worse than every number and no better than itself.
    assert not low.overlaps(lost)
    assert lost.overlaps(lost)
    assert low.better_than(high)
    assert low.better_than(lost)
    assert not lost.better_than(low)
    assert not lost.better_than(lost)


def test_words_are_listed():
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c"]) == "a, b and c"
