"""Ctrl-C between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

INTERRUPTED = 130
"""Exit status of a run that Ctrl-C stopped, as shells report it."""


class DeferredInterrupt:
    """Context in which the first Ctrl-C only sets `requested`; a second one interrupts at once.

    A training step that is cut in half cannot be resumed exactly, so the loop asks `requested`
    between steps. Outside of the main thread, where Python delivers no signals, nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: signal._HANDLER = None
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
