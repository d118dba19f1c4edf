"""Ctrl-C, or a scheduler's signal, between two steps instead of in the middle of one."""

from __future__ import annotations

import abc
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


class SignalContext(abc.ABC):
    """Context in which some signals call :meth:`note`.

    One that the process was told to ignore stays ignored, as nohup does with SIGHUP. Outside of the
    main thread, where Python delivers no signals, nothing changes.
    """

    numbers: tuple[int, ...]

    def __init__(self) -> None:
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self.numbers:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @abc.abstractmethod
    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal has come."""


class DeferredInterrupt(SignalContext):
    """Context in which a first Ctrl-C only sets `requested`; a second one interrupts at once.

    Each of `SIGNALS` counts as Ctrl-C. What comes within a second of the first is an echo of it:
    launchers of several processes repeat to them what the terminal has told them already.

    A training step that is cut in half cannot be resumed exactly, so the loop asks `requested`
    between steps.
    """

    numbers = SIGNALS

    def __init__(self) -> None:
        super().__init__()
        self.requested = False
        self._since = 0.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember the first one; insist at the second."""
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
        elif now > self._since + ECHO:
            raise KeyboardInterrupt
