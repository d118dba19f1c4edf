"""Statistics that keep a NaN a NaN; numbers, times and tables as people read them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"
"""What stands where there is no number."""


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


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A table in Markdown, for a terminal too: columns are as wide as their widest cell.

    Args:
        head: titles of the columns.
        rows: as many cells each.
        words: columns, from the left, that hold words; the others are ranged right.
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        [f"{cell:{'<' if i < words else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        for row in cells
    ]
    rule = ["-" * width if i < words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines.insert(1, rule)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(what: str, columns: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of named rows.

    Args:
        what: title of the names.
        columns: formats of a row's numbers by the title of their column.
        rows: by name.
    """
    forms = columns.values()
    cells = [(name, *(form.format(**row) for form in forms)) for name, row in rows.items()]
    return markdown_table((what, *columns), cells)
