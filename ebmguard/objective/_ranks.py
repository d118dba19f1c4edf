"""What ranks tell each other: a few numbers each, whatever the size of their batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ProcessGroup", "gathered", "summed"]

ProcessGroup: TypeAlias = "dist.ProcessGroup | None"


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


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return torch.cat([x.detach().to(dtype).flatten() for x in tensors])


def _unpacked(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(message, [x.numel() for x in like], -1)
    return [
        part.reshape(message.shape[:-1] + x.shape).to(x.dtype)
        for part, x in zip(parts, like, strict=True)
    ]
