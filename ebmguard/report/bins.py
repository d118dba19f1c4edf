"""A series of any length in bounded memory, from which no spike is lost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bin", "BinnedSeries"]


@dataclass(slots=True)
class Bin:
    """The extremes of a stretch of steps, and where they are; NaN where no value is finite."""

    step: int  # the first with a value
    low: float = math.nan  # of the finite values, as are high, mean and count
    low_at: int = 0
    high: float = math.nan
    high_at: int = 0
    bad_at: int | None = None  # the first step whose value is not finite
    mean: float = math.nan
    count: int = 0

    @classmethod
    def over(cls, steps: Sequence[int], values: Sequence[float]) -> Bin:
        """The bin of one step or more."""
        first, bad_at, total = steps[0], None, sum(values)
        if not math.isfinite(total):
            pairs = list(zip(steps, values, strict=True))
            bad_at = next((step for step, value in pairs if not math.isfinite(value)), None)
            pairs = [pair for pair in pairs if math.isfinite(pair[1])]
            steps, values = [step for step, _ in pairs], [value for _, value in pairs]
        if not values:
            return cls(first, bad_at=bad_at)
        low, high, count = min(values), max(values), len(values)
        low_at, high_at = steps[values.index(low)], steps[values.index(high)]
        # The sum may overflow, the mean does not.
        mean = total / count if math.isfinite(total) else sum(value / count for value in values)
        return cls(first, low, low_at, high, high_at, bad_at, mean, count)

    @property
    def is_gap(self) -> bool:
        """No value is finite."""
        return math.isnan(self.low)

    def join(self, other: Bin) -> None:
        """Take in a later stretch; of equal values the earlier one stays."""
        if not other.low >= self.low and not other.is_gap:
            self.low, self.low_at = other.low, other.low_at
        if not other.high <= self.high and not other.is_gap:
            self.high, self.high_at = other.high, other.high_at
        if self.bad_at is None:
            self.bad_at = other.bad_at
        if other.count:
            self.count += other.count
            share = other.count / self.count
            # Not the difference of the two, which may overflow.
            self.mean = other.mean * share + (self.mean * (1 - share) if share < 1 else 0.0)

    def points(self) -> list[tuple[int, float]]:
        """Its one or two extreme points, in the order of steps."""
        return [] if self.is_gap else sorted({(self.low_at, self.low), (self.high_at, self.high)})


class BinnedSeries:
    """Values by step, as at most ``capacity`` bins of equal width.

    While there is room every step has a bin of its own. Then neighbours join, so that the points of
    all bins hold every extreme exactly, whatever the length of the run.
    """

    def __init__(self, capacity: int = 600) -> None:
        self.capacity = capacity
        self.width = 1
        self.bins: list[Bin] = []

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take the values of steps, which ascend and are not before the last one."""
        start = 0
        while start < len(steps):
            end = bisect_left(steps, (steps[start] // self.width + 1) * self.width, start)
            self._take(Bin.over(steps[start:end], values[start:end]))
            start = end
            if len(self.bins) > self.capacity:
                self.width *= 2
                old, self.bins = self.bins, []
                for own in old:
                    self._take(own)

    def _take(self, new: Bin) -> None:
        if self.bins and self.bins[-1].step // self.width == new.step // self.width:
            self.bins[-1].join(new)
        else:
            self.bins.append(new)
