"""What a person sees of a running trainer: a progress bar, or plain lines where there is no TTY."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress, TaskID

from ebmguard.errors import printable

from ..plots.numbers import number

package_logger = logging.getLogger("ebmguard")
logger = logging.getLogger("ebmguard.train")


class Reporter:
    """Receives the state of a run after every step. This one says nothing; others say something."""

    def start(self, name: str, done: int, total: int) -> None:
        """The run begins at step `done` of `total`."""

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """`done` steps are finished; `state` holds what is worth showing, by name."""

    def note(self, text: str) -> None:
        """Something happened that a person should read."""

    def stop(self) -> None:
        """The run is over."""


class PrintableFormatter(logging.Formatter):
    """Messages that name folders and alerts of others, as a terminal may see them."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text; what the guard says begins with its name."""
        text = super().format(record)
        return printable(f"ebmguard: {text}" if record.name == package_logger.name else text)


def log_to_terminal() -> None:
    """Show what is logged, INFO included, unless the program has set up logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class LineReporter(Reporter):
    """Plain lines through `logging`, one every `every` steps and one for each note."""

    def __init__(self, every: int = 100) -> None:
        self.every = every
        self._total = 0

    def start(self, name: str, done: int, total: int) -> None:
        """Say which run begins."""
        self._total = total
        logger.info("%s: step %d of %d", name, done, total)

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """Log the state every `every` steps."""
        if done % self.every == 0 or done == self._total:
            logger.info("%d/%d  %s", done, self._total, state_text(state))

    def note(self, text: str) -> None:
        """Log the text."""
        logger.info("%s", text)


class BarReporter(Reporter):
    """A progress bar, and the guard's state in a line below it, drawn by rich.

    While it is on the screen, what the package logs (alerts) appears above it.
    """

    def __init__(self) -> None:
        self._state = ""
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._task: TaskID | None = None
        self._handler: logging.Handler | None = None

    def start(self, name: str, done: int, total: int) -> None:
        """Draw the bar."""
        from rich.console import Group
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._task = progress.add_task(printable(name), total=total, completed=done)
        self._live = Live(get_renderable=lambda: Group(progress, Text(self._state)))
        self._progress = progress
        self._handler = _NoteHandler(self)
        package_logger.addHandler(self._handler)
        package_logger.propagate = False
        self._live.start()

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """Move the bar and show the state."""
        self._state = state_text(state)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done)

    def note(self, text: str) -> None:
        """Print the text above the bar."""
        if self._live is not None:
            self._live.console.print(printable(text), markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the bar as it is."""
        if self._handler is not None:
            package_logger.removeHandler(self._handler)
            package_logger.propagate = True
            self._handler = None
        if self._live is not None:
            self._live.stop()


class _NoteHandler(logging.Handler):
    """Log records as notes of a reporter: written past the bar, they would tear it apart."""

    def __init__(self, reporter: BarReporter) -> None:
        super().__init__(level=logging.INFO)
        self.setFormatter(PrintableFormatter("%(message)s"))
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        """Show the record's message."""
        self._reporter.note(self.format(record))


def default_reporter(every: int = 100) -> Reporter:
    """A bar on a terminal; elsewhere, or without rich, one line every `every` steps."""
    if not sys.stderr.isatty() or not sys.stdout.isatty():
        return LineReporter(every)
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return LineReporter(every)
    return BarReporter()


def state_text(state: Mapping[str, float | str]) -> str:
    """Name and value pairs on one line, numbers to three digits."""
    return "  ".join(
        f"{name} {value if isinstance(value, str) else number(value)}"
        for name, value in state.items()
    )
