"""What a person sees of a grid: a table that changes, or lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from ebmguard.errors import printable

from ..plots.numbers import duration, mean
from .cell import Cell


class View:
    """Context that shows each cell: what it does, its steps, and how long it has taken."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        from rich.progress import Progress, TextColumn, TimeElapsedColumn

        self._cells = cells
        self._waiting = len(cells)
        self._since: dict[int, float] = {}
        self._seconds: list[float] = []
        names = ("{task.description}", "{task.fields[state]}", "{task.fields[steps]}")
        columns = (*(TextColumn(name, markup=False) for name in names), TimeElapsedColumn())
        self._is_shown = sys.stdout.isatty()
        self._table = Progress(*columns, disable=not self._is_shown)
        for cell in cells:
            words: dict[str, Any] = {"state": "waiting", "steps": ""}
            self._table.add_task(printable(cell.title), start=False, **words)

    def __enter__(self) -> View:
        self._table.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._table.stop()

    def say(self, text: str) -> None:
        """A line, above the table."""
        print(printable(text), flush=True)

    def began(self, number: int, text: str) -> None:
        """A cell runs now."""
        self._waiting -= 1
        self._since[number] = time.monotonic()
        self._table.start_task(self._table.task_ids[number])
        self._set(number, text)

    def ended(self, number: int, text: str, *, trained: bool = False) -> None:
        """A cell is over, or as far as it comes in this sweep."""
        began = self._since.pop(number, None)
        self._table.stop_task(self._table.task_ids[number])
        if began is None:
            self._waiting -= 1
        elif trained:
            self._seconds.append(time.monotonic() - began)
            text = f"{text}, {duration(self._seconds[-1])}{self._left()}"
        self._set(number, text)

    def refresh(self) -> None:
        """Look at how far the runs have come, where somebody sees it."""
        for number in self._since if self._is_shown else ():
            self._table.update(self._table.task_ids[number], steps=self._cells[number].progress())

    def _set(self, number: int, text: str) -> None:
        state = printable(text.partition("\n")[0])
        self._table.update(self._table.task_ids[number], state=state)
        if not self._is_shown:
            self.say(f"{self._cells[number].title}: {state}")

    def _left(self) -> str:
        left = len(self._since) + self._waiting
        if not left:
            return ""
        seconds = mean(self._seconds) * left / max(1, len(self._since))
        return f"; {left} left, about {duration(seconds)}"
