"""Calls that may come at any time: from any thread, a signal's handler, a sink, a rule."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

__all__ = ["Turns", "in_turn"]

C = TypeVar("C", bound=Callable[..., None])


class Turns:
    """Runs calls whole, one after the other, in their order.

    One from inside another, as of a signal's handler or a sink, runs once that has ended, whatever
    it has raised. One of another thread waits. Turns that share a lock nest.
    """

    def __init__(self, lock: Any = None) -> None:
        self.lock = lock or threading.RLock()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def __deepcopy__(self, memo: object) -> Turns:
        return Turns()

    def run(self, *calls: Callable[[], None]) -> None:
        """Run these calls, or leave them to the one that they come from."""
        self._calls += calls
        with self.lock:
            if self._is_busy:
                return
            self._is_busy = True
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                self._is_busy = False
                if self._calls:
                    self.run()


def in_turn(method: C) -> C:
    """A method that returns nothing, run by the ``turns`` of its object."""

    @wraps(method)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> None:
        self.turns.run(partial(method, self, *args, **kwargs))

    return waiting  # type: ignore[return-value]
