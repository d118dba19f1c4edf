"""Ctrl-C, or a scheduler's signal, between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Self

ECHO = 1.0
"""Seconds in which a repeated signal is taken for the first one."""
INTERRUPTED = 130
"""Exit status of a run that Ctrl-C stopped, as shells report it."""

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)  # Windows has the first two
)
"""What stops a run: Ctrl-C; a scheduler that takes the machine back; the terminal is gone; Slurm's
warning (`--signal=USR1@120`)."""


class DeferredInterrupt:
    """Context in which a first signal only sets `requested`; a second Ctrl-C interrupts at once.

    Each of `SIGNALS` asks, and only Ctrl-C insists: schedulers send theirs twice, and then kill.
    What comes within a second of the first is an echo of it: launchers of several processes repeat
    to them what the terminal has told them already. A signal that the process was told to ignore
    stays ignored, as nohup does with SIGHUP. Outside of the main thread, where Python delivers no
    signals, nothing changes.

    A training step that is cut in half cannot be resumed exactly, so the loop asks `requested`
    between steps.
    """

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember the first one; insist at the second."""
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
        elif number == signal.SIGINT and now > self._since + ECHO:
            self.insist()

    def insist(self) -> None:
        """Ctrl-C has come again."""
        raise KeyboardInterrupt
