"""Numbers of a step on their way from the device to the host, without a wait."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

LAG = 2
"""Steps after which a number of a GPU is read: by then it has arrived."""


class LaggedNumbers:
    """A few numbers of each step, read two steps later on a GPU and at once on a CPU."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def put(self, step: int, numbers: Tensor) -> list[tuple[int, list[float]]]:
        """Send the numbers of a step.

        Args:
            step: its number.
            numbers: (n,) on any device.

        Returns:
            (step, numbers) pairs that can be read by now, in the order of the steps.
        """
        arrived = None
        if numbers.is_cuda:
            stream = torch.cuda.current_stream(numbers.device)
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
        self._queue.append((step, numbers, arrived))
        return self._read(LAG if arrived is not None else 0)

    def drain(self) -> list[tuple[int, list[float]]]:
        """Wait for all that is under way."""
        return self._read(0)

    def _read(self, kept: int) -> list[tuple[int, list[float]]]:
        found = []
        while len(self._queue) > kept:
            step, numbers, arrived = self._queue.popleft()
            if arrived is not None:
                arrived.synchronize()
            found.append((step, numbers.tolist()))
        return found
