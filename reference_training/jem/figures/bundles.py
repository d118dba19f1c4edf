"""Many consecutive values as a few: minimum, maximum and centre of gravity (Figure 16)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VALUES = 200
"""Values that become one point in the paper, of a run of 140,600."""
LEAST_POINTS = 40
"""A short run is drawn with fewer values a point, so that it has about so many points."""
LINTHRESH = 0.1
"""The symmetric log axis is linear up to this size. Beyond it ten times as much is as far again as
from 0 to 0.9 of it: matplotlib's "symlog" of base 10."""

_LINEAR = 1 / (1 - 1 / 10)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bundles:
    """K points, each of consecutive values.

    Attributes:
        steps: (K,) the mean of their steps.
        low, high: (K,) the smallest and the largest finite value; NaN where none is finite.
        centre: (K,) the centre of gravity of the finite values on the symmetric log axis: the
            value at the mean of their places. NaN where none is finite.
        lost: (K,) how many values are not finite.
    """

    steps: Floats
    low: Floats
    high: Floats
    centre: Floats
    lost: NDArray[np.int64]


def bundle(steps: NDArray[np.int64], values: Floats, size: int) -> Bundles:
    """Every `size` consecutive values as one point; the last one may have fewer.

    Args:
        steps: (T,).
        values: (T,).
        size: at least 1.
    """
    count = -(-len(values) // size)
    # The last row is filled up with values that no statistic sees.
    padded = np.full(count * size, np.nan)
    padded[: len(values)] = values
    table = padded.reshape(count, size)
    there = np.arange(count * size).reshape(count, size) < len(values)
    finite = np.isfinite(table)
    kept = finite.sum(axis=1)
    some = kept > 0
    places = np.where(finite, to_axis(np.where(finite, table, 0.0)), 0.0)
    when = np.zeros(count * size)
    when[: len(steps)] = steps
    return Bundles(
        steps=when.reshape(count, size).sum(axis=1) / there.sum(axis=1),
        low=np.where(some, np.where(finite, table, np.inf).min(axis=1, initial=np.inf), np.nan),
        high=np.where(some, np.where(finite, table, -np.inf).max(axis=1, initial=-np.inf), np.nan),
        centre=np.where(some, from_axis(places.sum(axis=1) / np.maximum(kept, 1)), np.nan),
        lost=(there & ~finite).sum(axis=1),
    )


def bundle_size(longest: int) -> int:
    """Values a point, for runs of which the longest has so many."""
    return max(1, min(VALUES, longest // LEAST_POINTS))


def to_axis(values: Floats) -> Floats:
    """Places of values on the symmetric log axis, 0 at 0."""
    size = np.abs(values)
    log = LINTHRESH * (_LINEAR + np.log10(np.maximum(size, LINTHRESH)) - np.log10(LINTHRESH))
    return np.sign(values) * np.where(size <= LINTHRESH, size * _LINEAR, log)


def from_axis(places: Floats) -> Floats:
    """The values at places on the symmetric log axis."""
    size = np.abs(places)
    edge = LINTHRESH * _LINEAR
    power = 10 ** (np.maximum(size, edge) / LINTHRESH - _LINEAR)
    return np.sign(places) * np.where(size <= edge, size / _LINEAR, LINTHRESH * power)
