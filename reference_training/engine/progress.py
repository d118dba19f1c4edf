"""What a person sees of a running trainer: a progress bar, or plain lines where there is no TTY."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ebmguard.errors import printable

from ..plots.numbers import number

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


class TerminalHandler(logging.Handler):
    """Messages that name folders and alerts of others, as a terminal may see them.

    What the guard says begins with its name. Where a bar is drawn, rich puts them above it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's text to the standard error of now."""
        whose = "ebmguard: " if record.name == "ebmguard" else ""
        print(printable(whose + self.format(record)), file=sys.stderr)


def log_to_terminal() -> None:
    """Show what is logged, INFO included, unless the program has set up logging."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[TerminalHandler()])


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
    """A progress bar, and the guard's state in a line below it, drawn by rich."""

    def __init__(self) -> None:
        words = TextColumn("{task.description}", markup=False)
        self._bar = Progress(words, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._state = ""
        self._live = Live(get_renderable=lambda: Group(self._bar, Text(self._state)))

    def start(self, name: str, done: int, total: int) -> None:
        """Draw the bar."""
        self._task = self._bar.add_task(printable(name), total=total, completed=done)
        self._live.start()

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """Move the bar and show the state."""
        self._state = state_text(state)
        self._bar.update(self._task, completed=done)

    def note(self, text: str) -> None:
        """Print the text above the bar."""
        self._live.console.print(printable(text), markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._live.stop()


def default_reporter(every: int = 100) -> Reporter:
    """A bar on a terminal; elsewhere one line every `every` steps."""
    is_terminal = sys.stderr.isatty() and sys.stdout.isatty()
    return BarReporter() if is_terminal else LineReporter(every)


def state_text(state: Mapping[str, float | str]) -> str:
    """Name and value pairs on one line, numbers to three digits."""
    return "  ".join(
        f"{name} {value if isinstance(value, str) else number(value)}"
        for name, value in state.items()
    )
