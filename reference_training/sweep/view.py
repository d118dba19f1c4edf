"""What a person sees of a grid: a table that changes, or lines where there is no terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from ebmguard.errors import printable

from ..plots.numbers import duration, mean
from .cell import Cell

TAIL = 200
"""Bytes from the end of a log, of which the last line is shown."""


class View(Progress):
    """Context that shows each cell: what it does, how long it has taken, and what it said last."""

    def __init__(self, cells: Sequence[Cell], workers: int) -> None:
        name, state, said = (
            TextColumn(text, markup=False, table_column=Column(no_wrap=True, ratio=ratio))
            for text, ratio in (
                ("{task.description}", None),
                ("{task.fields[state]}", None),
                ("{task.fields[said]}", 1),  # what is left of the line
            )
        )
        columns = (name, state, TimeElapsedColumn(), said)
        # By a thread of its own it would be refreshed while processes are begun.
        is_shown = sys.stdout.isatty()
        super().__init__(*columns, expand=True, auto_refresh=False, disable=not is_shown)
        self._cells, self._workers = cells, workers
        self._seconds: list[float] = []
        for cell in cells:
            self.add_task(printable(cell.out.name), start=False, state="waiting", said="")

    def say(self, text: str) -> None:
        """A line, above the table."""
        print(printable(text), flush=True)

    def began(self, number: int, text: str) -> None:
        """A cell runs now."""
        self.start_task(TaskID(number))
        self.show(number, text)

    def ended(self, number: int, text: str, *, trained: bool = False) -> None:
        """A cell is over, or as far as it comes in this sweep."""
        self.stop_task(TaskID(number))
        if trained:
            self._seconds.append(self.tasks[number].elapsed or 0.0)
            text = f"{text}, {duration(self._seconds[-1])}"
            if left := sum(task.stop_time is None for task in self.tasks):
                seconds = mean(self._seconds) * left / min(left, self._workers)
                text = f"{text}; {left} left, about {duration(seconds)}"
        self.show(number, text)

    def look(self) -> None:
        """See what the running cells say, where somebody sees it."""
        for task, cell in zip(self.tasks, () if self.disable else self._cells, strict=False):
            if task.started and task.stop_time is None:
                with cell.log.open("rb") as log:
                    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
                    lines = log.read().decode(errors="replace").splitlines()
                self.update(task.id, said=printable(lines[-1]))
        self.refresh()

    def show(self, number: int, text: str) -> None:
        """What a cell does."""
        state = printable(text.partition("\n")[0])
        self.update(TaskID(number), state=state, said="")
        if self.disable:
            self.say(f"{self._cells[number].out.name}: {state}")
