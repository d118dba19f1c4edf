"""What the ranks of a run tell each other: small messages at every step, plain values rarely."""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks", "gathered", "leave_time_at_exit", "summed"]


@cache
def leave_time_at_exit() -> None:
    """Let gloo's threads drop their last message before Python ends, once per process.

    A thread that drops it later aborts a run that has ended well (pytorch/pytorch#190489), as long
    as anything holds the process group: DistributedDataParallel does, and so does a guard.
    """
    atexit.register(time.sleep, 0.1)


def gathered(process_group: dist.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Each tensor of every rank, along a new first dimension; the same on all ranks, detached.

    They travel as one message, in the widest of their dtypes.
    """
    message = _packed(tensors)
    everyone = message.new_empty(dist.get_world_size(process_group), len(message))
    dist.all_gather(list(everyone.unbind()), message, group=process_group)
    return _unpacked(everyone, tensors)


def summed(process_group: dist.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Each tensor summed over the ranks; the same on all ranks, detached. One message, as above."""
    message = _packed(tensors)
    dist.all_reduce(message, group=process_group)
    return _unpacked(message, tensors)


@dataclass(frozen=True)
class Ranks:
    """The processes that train together: a process group, or None for a single process."""

    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            leave_time_at_exit()

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that logs and writes for all."""
        return self.group is None or dist.get_rank(self.group) == 0

    def own(self, folder: Path) -> Path:
        """This rank's part of a folder; of a single process all of it."""
        return folder if self.group is None else folder / f"rank{dist.get_rank(self.group)}"

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank: a plain value, and not at every step."""
        values = [value] * self.count
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return torch.cat([x.detach().to(dtype).flatten() for x in tensors])


def _unpacked(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(message, [x.numel() for x in like], -1)
    return [
        part.reshape(message.shape[:-1] + x.shape).to(x.dtype)
        for part, x in zip(parts, like, strict=True)
    ]
