"""How long a grid will still take."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence


def remaining_seconds(
    took: Sequence[float], running: Sequence[float], waiting: int, slots: int
) -> float | None:
    """Time to the end of a grid, if every run takes the mean of those that have ended.

    Args:
        took: seconds of each run that has ended.
        running: seconds that each run in progress has taken so far.
        waiting: runs that have not started.
        slots: runs at a time, at least as many as are running.

    Returns:
        None before the first run has ended.
    """
    if not took:
        return None
    mean = statistics.fmean(took)
    free_at = [max(0.0, mean - seconds) for seconds in running]
    free_at += [0.0] * (slots - len(running))
    heapq.heapify(free_at)
    for _ in range(waiting):
        heapq.heapreplace(free_at, free_at[0] + mean)
    return max(free_at)
