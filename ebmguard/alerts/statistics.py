"""Median of a series' recent past, at a few microseconds per step.

A median, because a mean is dragged along by the very outliers that it should reveal.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from ..errors import ConfigError

__all__ = ["RollingWindow"]


class RollingWindow:
    """The last ``size`` finite values of a series, kept both in order of time and sorted.

    One NaN in a sorted list would break every later search in silence: non-finite ones are refused.
    """

    def __init__(self, size: int, values: Sequence[float] = ()) -> None:
        if size < 1:
            raise ConfigError(f"A window holds at least one value, but size is {size}.")
        self.size = size
        self._values = list(map(float, values[-size:]))
        self._sorted = sorted(self._values)
        if not all(map(math.isfinite, self._values)):
            raise ConfigError(f"A window takes finite values, but got {self._values}.")

    def __len__(self) -> int:
        return len(self._values)

    def push(self, value: float) -> None:
        """Add a value; the oldest one leaves a full window.

        Raises:
            ConfigError: if the value is not finite.
        """
        if not math.isfinite(value):
            raise ConfigError(f"A window takes finite values, but got {value}.")
        if len(self._values) == self.size:
            del self._sorted[bisect_left(self._sorted, self._values.pop(0))]
        self._values.append(value)
        insort(self._sorted, value)

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)  # oldest first

    def median(self) -> float:
        """Median of the window, NaN if it is empty."""
        ordered, half = self._sorted, len(self._sorted) // 2
        if len(ordered) % 2:
            return ordered[half]
        # Halves first: the sum of two large floats may overflow.
        return ordered[half - 1] / 2 + ordered[half] / 2 if ordered else math.nan
