"""Median and MAD of a series' recent past, at a few microseconds per step.

Median and median absolute deviation, because a mean and a standard deviation are dragged along by
the very outliers they should reveal: one step of a blow-up would hide the next.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from ..errors import ConfigError

__all__ = ["MAD_TO_SIGMA", "RollingWindow"]

MAD_TO_SIGMA = 1.4826  # for normal data


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

    def values(self) -> list[float]:
        """The values, oldest first."""
        return self._values.copy()

    def median(self) -> float:
        """Median of the window, NaN if it is empty."""
        ordered, half = self._sorted, len(self._sorted) // 2
        if len(ordered) % 2:
            return ordered[half]
        # Halves first: the sum of two large floats may overflow.
        return ordered[half - 1] / 2 + ordered[half] / 2 if ordered else math.nan

    def mad(self, centre: float) -> float:
        """Median absolute deviation from ``centre`` (the median) of a window that is not empty.

        The h values nearest to the centre are a slice of the sorted list, found by bisection on
        its start (log n comparisons) instead of sorting n deviations.
        """
        ordered, n = self._sorted, len(self._sorted)
        half = n // 2 + 1
        low, high = 0, n - half
        while low < high:
            middle = (low + high) // 2
            # The slice is too far left while the value it would gain is nearer than the one lost.
            if centre - ordered[middle] > ordered[middle + half] - centre:
                low = middle + 1
            else:
                high = middle
        left, right = centre - ordered[low], ordered[low + half - 1] - centre
        if n % 2:
            return max(left, right)
        # An even count: the mean of the two middle deviations. The second farthest of the slice
        # is the slice's other end, or the neighbour of its farthest end.
        if left >= right:
            return max(centre - ordered[low + 1], right) / 2 + left / 2
        return max(left, ordered[low + half - 2] - centre) / 2 + right / 2
