"""Ctrl-C while runs are in progress: the first one asks, the second one insists."""

from __future__ import annotations

import signal
from types import FrameType

from ..engine.interrupt import SignalContext


class Stop(SignalContext):
    """Context that notes Ctrl-C instead of being interrupted by it.

    SIGTERM, which schedulers and torchrun send, asks too, but never insists: some send it twice.

    Attributes:
        asked: whether the sweep is to stop.
        insists: whether it is not even to wait for checkpoints.
    """

    numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self.insists = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self.insists = self.asked and number == signal.SIGINT
        self.asked = True
