"""The choice of a long run's rows for ``log_dir``: all at first and around alerts, then fewer."""

from __future__ import annotations

from collections import deque

from ..tags import ALERT_LEVEL, LOG_EVERY
from .protocol import Histograms, Scalars

__all__ = ["Thinning"]

# From which row on one in how many is written.
_RATES = (0, 1), (20_000, 10), (1_000_000, 100)
# Rows before an alert, and after it, that are all written.
_BEFORE, _AFTER = 100, 50
_Row = tuple[int, Scalars, Histograms]


class Thinning:
    """Decide for every row whether it is written; rewrite nothing.

    Up to the 20,000th, by step or by place in the file, all are written. Then one in ten is, and
    from the millionth on one in a hundred; their ``log_every`` says so. Also written: the first
    row in every such stretch with a further number (some numbers are rare), rows where
    ``alert_level`` changes, and all around an alert. To keep their order, rows wait here for the
    hundred rows after them.

    Args:
        rows: how many the file holds already.
        is_on: whether anything is left out.
    """

    def __init__(self, rows: int = 0, *, is_on: bool = True) -> None:
        self._rows, self._rates = rows, _RATES if is_on else _RATES[:1]
        self._waiting: deque[tuple[bool, _Row]] = deque()  # whether the row is due
        self._after = 0  # rows that are still to be written for an alert
        self._stretch, self._names, self._level = -1, set[str](), 0.0

    def take(self, step: int, scalars: Scalars, samples: Histograms) -> list[_Row]:
        """Take the row of a step; return the rows to write now, oldest first."""
        self._rows += 1
        place, every = max(step, self._rows - 1), 1
        for begin, n in self._rates:
            every = n if begin <= place else every
        if every == 1:
            before = self.rest() if self._waiting else []
            return [*before, (step, scalars, samples)]
        level = scalars.get(ALERT_LEVEL, self._level)
        if step // every != self._stretch:
            self._stretch, self._names = step // every, set()
        is_due = level != self._level or not self._names.issuperset(scalars)
        self._level = level
        self._names.update(scalars)
        marked = {**scalars, LOG_EVERY: float(every)}
        self._waiting.append((is_due, (step, marked, samples)))
        if self._after > 0:
            self._after -= 1
            return self.rest()
        ready = [self._waiting.popleft() for _ in range(len(self._waiting) - _BEFORE)]
        return [row for is_due, row in ready if is_due]

    def alert(self) -> list[_Row]:
        """Return the unwritten rows before an alert. The rows after it will be written."""
        self._after = _AFTER
        return self.rest()

    def rest(self, *, due: bool = False) -> list[_Row]:
        """Return all waiting rows, or those that are due; no row waits any longer."""
        rows = [row for is_due, row in self._waiting if is_due or not due]
        self._waiting.clear()
        return rows
