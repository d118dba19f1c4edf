"""Statistics that keep a NaN a NaN; numbers and times as people read them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .markdown import NONE


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


def number(value: float | None, digits: int = 3) -> str:
    """A few digits, no power of ten from 0.0001 to a million; words for NaN and None."""
    if value is None:
        return NONE
    if math.isnan(value):
        return "undefined"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if 10**digits - 0.5 <= size < 1e6:  # 99.7 of two digits would be 1e+02
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def word(value: object) -> str:
    """A setting of any type; whole numbers with their thousands apart."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
