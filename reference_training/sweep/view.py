"""What a person sees of a grid: a table that changes, or lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebmguard.errors import printable

from ..plots.numbers import duration, mean

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from .plan import Task


class View:
    """Context that shows each cell: what it does, its steps, and how long it has taken."""

    def __init__(self, cells: Sequence[Task]) -> None:
        self._cells = cells
        self._state = ["waiting"] * len(cells)
        self._since: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._progress: dict[int, str] = {}
        self._live: Live | None = None

    def __enter__(self) -> View:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(get_renderable=self._table, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line, above the table."""
        if self._live:
            self._live.console.print(printable(text), markup=False, highlight=False)
        else:
            print(printable(text), flush=True)

    def began(self, number: int, text: str) -> None:
        """A cell runs now; again, where its worker was lost."""
        self._since[number] = time.monotonic()
        self._set(number, text)

    def ended(self, number: int, text: str, *, trained: bool = False) -> None:
        """A cell is over, or as far as it comes in this sweep."""
        began = self._since.pop(number, None)
        if trained and began is not None:
            self._seconds[number] = time.monotonic() - began
            text = f"{text}, {duration(self._seconds[number])}{self._left()}"
        self._set(number, text)

    def refresh(self) -> None:
        """Look at how far the runs have come, where somebody sees it."""
        if self._live:
            self._progress |= {number: self._cells[number].progress() for number in self._since}

    def _set(self, number: int, text: str) -> None:
        self._state[number] = text.partition("\n")[0]
        if not self._live:
            self.say(f"{self._cells[number].title}: {self._state[number]}")

    def _left(self) -> str:
        left = len(self._since) + self._state.count("waiting")
        if not left:
            return ""
        seconds = mean(list(self._seconds.values())) * left / max(1, len(self._since))
        return f"; {left} left, about {duration(seconds)}"

    def _table(self) -> Table:
        from rich.table import Table

        table = Table("run", "state", "steps", "time", box=None)
        for number, cell in enumerate(self._cells):
            seconds = self._seconds.get(number)
            if number in self._since:
                seconds = time.monotonic() - self._since[number]
            table.add_row(
                printable(cell.title),
                printable(self._state[number]),
                self._progress.get(number, ""),
                "" if seconds is None else duration(seconds),
            )
        return table
