"""Ctrl-C, or a scheduler's SIGTERM, between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

INTERRUPTED = 130
"""Exit status of a run that Ctrl-C stopped, as shells report it."""


class DeferredInterrupt:
    """Context in which a first Ctrl-C only sets `requested`; a second one interrupts at once.

    SIGTERM, by which schedulers announce that they take a machine back, counts as Ctrl-C.

    A training step that is cut in half cannot be resumed exactly, so the loop asks `requested`
    between steps. Outside of the main thread, where Python delivers no signals, nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
