"""`ebmguard watch`: a run on the terminal, while it goes on."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from ..errors import ConfigError
from .charts import CHARTS
from .follow import Followed
from .frame import frame

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["WatchConfig", "watch"]

_EVERY = 1.0
# Without a terminal a frame is appended to what was printed before, so there are fewer.
_EVERY_AS_TEXT = 30.0
_RATE_OVER = 60.0
# A frame that is not for a screen is as tall as it needs to be.
_TEXT_HEIGHT = 50


@dataclass(frozen=True)
class WatchConfig:
    """Watch a run until it is over: diagnostics with their healthy bands, alerts and rollbacks.

    The folder may be one that does not exist yet. A run whose trainer writes no results.json is
    watched until Ctrl-C.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder: the trainer's, or the guard's log_dir."""
    once: bool = False
    """Print the present state and exit."""


def watch(config: WatchConfig) -> int:
    """`ebmguard watch`.

    Returns:
        exit status 0, also after Ctrl-C, which is the way out.

    Raises:
        ConfigError: with ``once``, there is nothing to show; or a file is damaged.
        ImportError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError('watching needs rich: pip install "ebmguard[train]"') from error
    console = Console(highlight=False)
    run = Followed(config.run, [chart.tag for chart in CHARTS])
    try:
        if config.once:
            run.update()
            if not run.rows:
                raise ConfigError(
                    f"{config.run} holds no metrics.jsonl with rows, so there is nothing to show. "
                    "Name the folder of a run, or leave --once out to wait for it."
                )
            console.print(_frame(run, None, console))
        elif console.is_terminal:
            _live(run, console)
        else:
            _as_text(run, console)
    except KeyboardInterrupt:
        pass
    return 0


def _frame(run: Followed, rate: float | None, console: Console) -> RenderableType:
    height = console.height if console.is_terminal else _TEXT_HEIGHT
    return frame(run, rate, console.width, height)


class _Rate:
    """Rows per second over the last minute of watching."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, rows: int) -> float | None:
        """Take the count of now; None until some were seen to come."""
        now = time.monotonic()
        if self._seen and rows < self._seen[-1][1]:
            self._seen.clear()  # the file began anew
        self._seen.append((now, rows))
        while now - self._seen[0][0] > _RATE_OVER:
            self._seen.popleft()
        (start, before), elapsed = self._seen[0], now - self._seen[0][0]
        return (rows - before) / (now - start) if elapsed and rows > before else None


def _live(run: Followed, console: Console) -> None:
    """Redraw in place."""
    from rich.live import Live

    rate = _Rate()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        live.update(f"reading {run.path}", refresh=True)  # some seconds where it is long
        while True:
            run.update()
            live.update(_frame(run, rate.see(run.rows), console), refresh=True)
            if run.is_over:
                return
            time.sleep(_EVERY)


def _as_text(run: Followed, console: Console) -> None:
    """Append a frame whenever there is something new, but not too often."""
    rate = _Rate()
    printed = -_EVERY_AS_TEXT
    is_new = True
    while True:
        is_new |= run.update()
        speed = rate.see(run.rows)
        now = time.monotonic()
        if run.is_over or (is_new and now - printed >= _EVERY_AS_TEXT):
            console.print(_frame(run, speed, console))
            console.print()
            printed, is_new = now, False
        if run.is_over:
            return
        time.sleep(_EVERY)
