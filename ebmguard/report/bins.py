"""A series of any length in bounded memory, from which no spike is lost."""

from __future__ import annotations

import math
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
    """

    step: int
    low: float = math.nan
    low_at: int = 0
    high: float = math.nan
    high_at: int = 0
    bad_at: int | None = None

    @classmethod
    def of(cls, step: int, value: float) -> Bin:
        """The bin of a single step."""
        is_finite = math.isfinite(value)
        return cls(step, value, step, value, step) if is_finite else cls(step, bad_at=step)

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

    def add(self, step: int, value: float) -> None:
        """Take the value of a step, which is not before the last one."""
        self._take(Bin.of(step, value))
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
