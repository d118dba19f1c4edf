"""A series of any length in bounded memory, from which no spike is lost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bin", "BinnedSeries"]


@dataclass(slots=True)
class Bin:
    """The extremes of a stretch of steps, and where they are.

    Attributes:
        step: the first step with a value.
        low, high: smallest and largest finite value; NaN where there is none.
        low_at, high_at: their steps.
        bad_at: the first step whose value is not finite, else None.
        mean: of the finite values; NaN where there is none.
        count: how many of them there are.
    """

    step: int
    low: float = math.nan
    low_at: int = 0
    high: float = math.nan
    high_at: int = 0
    bad_at: int | None = None
    mean: float = math.nan
    count: int = 0

    @classmethod
    def of(cls, step: int, value: float) -> Bin:
        """The bin of a single step."""
        if not math.isfinite(value):
            return cls(step, bad_at=step)
        return cls(step, value, step, value, step, None, value, 1)

    @classmethod
    def over(cls, steps: Sequence[int], values: Sequence[float]) -> Bin:
        """The bin of one step or more."""
        total = sum(values)
        if math.isfinite(total):  # as nearly always: no value is anything but finite
            low, high = min(values), max(values)
            low_at, high_at = steps[values.index(low)], steps[values.index(high)]
            mean = total / len(values)
            return cls(steps[0], low, low_at, high, high_at, None, mean, len(values))
        whole = cls.of(steps[0], values[0])
        for step, value in zip(steps[1:], values[1:], strict=True):
            whole.join(cls.of(step, value))
        return whole

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

    While there is room every step has a bin of its own. Then neighbours join, and bins are twice as
    wide. So the points of all bins hold every extreme exactly, whatever the length of the run.
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
