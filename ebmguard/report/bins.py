"""Series of any length in bounded memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

__all__ = ["Bin", "BinnedSeries", "ThinnedSeries"]


@dataclass(slots=True)
class Bin:
    """The extremes of a stretch of steps and their steps; NaN if no value is finite."""

    step: int  # the first with a value
    low: float = math.nan  # of the finite values, as are high, last and count
    low_at: int = 0
    high: float = math.nan
    high_at: int = 0
    bad_at: int | None = None  # the first step whose value is not finite
    last: float = math.nan
    count: int = 0

    @classmethod
    def over(cls, steps: Sequence[int], values: Sequence[float]) -> Bin:
        """The bin of one step or more."""
        first, bad_at = steps[0], None
        if not math.isfinite(sum(values)):
            pairs = list(zip(steps, values, strict=True))
            bad_at = next((step for step, value in pairs if not math.isfinite(value)), None)
            pairs = [pair for pair in pairs if math.isfinite(pair[1])]
            if not pairs:
                return cls(first, bad_at=bad_at)
            steps, values = zip(*pairs, strict=True)
        low, high = min(values), max(values)
        low_at, high_at = steps[values.index(low)], steps[values.index(high)]
        return cls(first, low, low_at, high, high_at, bad_at, values[-1], len(values))

    @property
    def is_gap(self) -> bool:
        """True if no value is finite."""
        return math.isnan(self.low)

    def join(self, other: Bin) -> None:
        """Add a later stretch; of two equal values the earlier one stays."""
        if self.bad_at is None:
            self.bad_at = other.bad_at
        if other.is_gap:
            return
        if not other.low >= self.low:
            self.low, self.low_at = other.low, other.low_at
        if not other.high <= self.high:
            self.high, self.high_at = other.high, other.high_at
        self.last = other.last
        self.count += other.count

    def points(self) -> list[tuple[int, float]]:
        """The one or two extreme points, in the order of steps."""
        return [] if self.is_gap else sorted({(self.low_at, self.low), (self.high_at, self.high)})


class BinnedSeries:
    """Values by step, as at most ``capacity`` bins of equal width.

    While there is room, every step has a bin. Then neighbours merge, and no spike is lost.
    """

    def __init__(self, capacity: int = 600) -> None:
        self.capacity, self.width = capacity, 1
        self.bins: list[Bin] = []

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add values by step, in ascending order, none before the last step."""
        start = 0
        while start < len(steps):
            end = bisect_left(steps, (steps[start] // self.width + 1) * self.width, start)
            self._take(Bin.over(steps[start:end], values[start:end]))
            start = end
            if len(self.bins) > self.capacity:
                self.width *= 2
                old, self.bins = self.bins, []
                for old_bin in old:
                    self._take(old_bin)

    def _take(self, new: Bin) -> None:
        if self.bins and self.bins[-1].step // self.width == new.step // self.width:
            self.bins[-1].join(new)
        else:
            self.bins.append(new)


class ThinnedSeries:
    """Values by step: all of the latest ones, and some of the earlier ones.

    Args:
        most: how many of the latest are kept at least; in all at most four times as many.
    """

    def __init__(self, most: int) -> None:
        self._most, self._one_in = most, 1
        # Before, and whole, as steps and values.
        self._old: tuple[array[Any], array[Any]] = array("q"), array("d")
        self._new: tuple[array[Any], array[Any]] = array("q"), array("d")

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add values by step, in ascending order."""
        for column, more in zip(self._new, (steps, values), strict=True):
            column.extend(more)
        while len(self._new[0]) > 2 * self._most:
            for old, new in zip(self._old, self._new, strict=True):
                old.extend(new[: self._most : self._one_in])
                del new[: self._most]
            if len(self._old[0]) > 2 * self._most:
                self._one_in *= 2
                for old in self._old:
                    del old[1::2]

    def pairs(self) -> Iterator[tuple[int, float]]:
        """The kept steps and values."""
        return chain(*(zip(*columns, strict=True) for columns in (self._old, self._new)))
