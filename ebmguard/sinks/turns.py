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
    it has raised. One of another thread waits. Turns with the same lock nest.
    """

    def __init__(self, other: Turns | None = None) -> None:
        self.lock: Any = threading.RLock() if other is None else other.lock
        self._calls: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def __deepcopy__(self, memo: object) -> Turns:
        return Turns()

    def __call__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run this call, or leave it to the one that it comes from."""
        self._calls.append(partial(call, *args, **kwargs))
        self._go_on()

    def _go_on(self) -> None:
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
                    self._go_on()


def in_turn(method: C) -> C:
    """A method that returns nothing, run by the ``turns`` of its object."""

    @wraps(method)
    def waits(self: Any, *args: Any, **kwargs: Any) -> None:
        self.turns(method, self, *args, **kwargs)

    return waits  # type: ignore[return-value]
