"""Ctrl-C while runs are in progress: the first one asks, the second one insists."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Context that notes Ctrl-C instead of being interrupted by it.

    SIGTERM, which schedulers and torchrun send, asks too, but never insists: some send it twice.

    Attributes:
        asked: whether the sweep is to stop.
        insists: whether it is not even to wait for checkpoints.
    """

    def __init__(self) -> None:
        self.asked = False
        self.insists = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Stop:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.insists = self.asked and number == signal.SIGINT
        self.asked = True
