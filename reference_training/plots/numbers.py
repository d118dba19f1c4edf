"""Statistics that keep a NaN a NaN, and times in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value; NaN where one is, or where there are both infinities."""
    if {math.inf, -math.inf} <= set(values):
        return math.nan
    return statistics.fmean(values)


def median(values: Sequence[float]) -> float | None:
    """The median; NaN where one of the values is, None where there is none."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return statistics.median(values) if values else None


def duration(seconds: float) -> str:
    """A time in the largest unit of which there are two: days, hours, minutes or seconds."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
