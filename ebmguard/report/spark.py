"""A series as a few characters of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .charts import Scale
from .scales import Axis
from .thin import Bin

__all__ = ["NOT_A_NUMBER", "sparkline"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
NOT_A_NUMBER = "×"


def sparkline(bins: Sequence[Bin], scale: Scale, width: int, height: int = 1) -> list[str]:
    """Columns of blocks, one for each stretch of steps, that show where it went farthest.

    A column's value is the one farthest from the median of the series, so that a spike of a single
    step is seen however long the run. A column with a value that is not finite is marked by ×.

    Args:
        bins: a thinned series.
        scale: of the heights; they span the values that are there, but for "share".
        width, height: in characters.

    Returns:
        lines from top to bottom, each of ``width`` characters.
    """
    values = [value for own in bins for _, value in own.points()]
    if not bins:
        return [" " * width] * height
    axis = Axis.around(scale, values)
    middle = axis.at(statistics.median(values)) if values else 0.0
    first, last = bins[0].step, bins[-1].step
    columns: list[list[float]] = [[] for _ in range(width)]
    bad = set()
    for own in bins:
        # Fewer bins than columns are spread, so that time runs evenly from left to right.
        column = (own.step - first) * (width - 1) // max(1, last - first)
        columns[column] += [axis.at(value) for _, value in own.points()]
        if own.bad_at is not None:
            bad.add(column)
    lines = ["" for _ in range(height)]
    at = math.nan
    for i, heights in enumerate(columns):
        # What is measured every so many steps holds until it is measured again.
        at = max(heights, key=lambda x: abs(x - middle), default=at)
        for row in range(height):
            if i in bad:
                mark = NOT_A_NUMBER
            elif math.isnan(at):
                mark = " "
            else:
                # The lowest value is still seen: as the lowest block of the lowest line.
                filled = max(1, round(at * 8 * height)) - 8 * (height - 1 - row)
                mark = _BLOCKS[min(8, max(0, filled))]
            lines[row] += mark
    return lines
