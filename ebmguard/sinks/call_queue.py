"""A queue of calls that come at any time: from any thread, a signal's handler, a sink, a rule."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

__all__ = ["CallQueue", "queued"]

C = TypeVar("C", bound=Callable[..., None])


class CallQueue:
    """Run calls whole, one after the other, in their order.

    A call from inside another, as of a signal's handler or a sink, runs once that has ended,
    whatever it has raised. A call of another thread waits. Queues that share a lock nest.
    """

    def __init__(self, lock: Any = None) -> None:
        self.lock = lock or threading.RLock()
        self._calls: deque[Callable[[], None]] = deque()
        self._under_way: Callable[[], object] = lambda: None  # None while no call is

    def __deepcopy__(self, memo: object) -> CallQueue:
        return CallQueue()

    def run(self, *calls: Callable[[], None]) -> None:
        """Run these calls, or leave them to the one that they come from."""
        self._calls += calls
        with self.lock:
            if self._under_way() is not None:
                return
            token = set[None]()  # which this frame lets go of, however an interrupt ends it
            self._under_way = weakref.ref(token)
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                del token
                if self._calls:
                    self.run()


def queued(method: C) -> C:
    """A method that returns nothing, run by the queue ``turns`` of its object."""

    @wraps(method)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> None:
        self.turns.run(partial(method, self, *args, **kwargs))

    return waiting  # type: ignore[return-value]
