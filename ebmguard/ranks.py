"""What ranks tell each other."""

from __future__ import annotations

import atexit
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .energies import Groups, LogQ
from .errors import ConfigError

__all__ = [
    "Batch",
    "Ranks",
    "gathered",
    "leave_time_at_exit",
    "refuse_shards",
    "whole_batch",
]


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
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    message = torch.cat([x.detach().to(dtype).flatten() for x in tensors])
    everyone = message.new_empty(dist.get_world_size(process_group), len(message))
    dist.all_gather(list(everyone.unbind()), message, group=process_group)
    parts = torch.split(everyone, [x.numel() for x in tensors], -1)
    pairs, count = zip(parts, tensors, strict=True), len(everyone)
    return [y.reshape(count, *x.shape).to(x.dtype) for y, x in pairs]


class Batch(NamedTuple):
    """The samples of all ranks, in the order of the ranks."""

    f_pos: Tensor
    f_neg: Tensor
    groups: Groups | None = None
    log_q: LogQ | None = None
    sizes: tuple[list[int], list[int]] = ([], [])  # each rank's numbers of positives, of negatives


def _with_own(everyone: Tensor, own: Tensor, start: int, ranks: int) -> Tensor:
    """The samples of all ranks, of which this rank's carry the gradient of its own.

    It is multiplied by the number of ranks, by which the averaging of gradients divides.
    """
    own = own.clone()
    if own.requires_grad:
        own.register_hook(lambda gradient: gradient * ranks)  # type: ignore[no-untyped-call]
    after = start + own.shape[-1]
    return torch.cat([everyone[..., :start], own, everyone[..., after:]], -1)


def whole_batch(
    process_group: dist.ProcessGroup, own: Batch, *, same: Sequence[object] = ()
) -> Batch:
    """The batch of all ranks; the same on every rank, which then computes the same of it.

    Two messages, with groups three: sizes, energies with log q, labels. The host waits for the
    sizes; where the group has a backend for the CPU, not for the device.

    Args:
        own: this rank's, with energies ``(..., N)`` and ``(..., M)``, which may differ between
            ranks. Their gradient is that of one process after an averaging all-reduce.
        same: what every rank must have alike; of tensors their values are not read.

    Raises:
        ConfigError: on every rank, where they disagree on dtype, groups, log q or ``same``.
    """
    f_pos, f_neg, groups, log_q = own[:4]
    words = ["a tensor" if isinstance(x, Tensor) else repr(x) for x in same]
    words += [f"{f_pos.dtype}, {f_neg.dtype}, log_q {'with' if log_q else 'without'}"]
    by, given = f"in rows of {f_neg.shape[-1] // f_pos.shape[-1]}", tuple[Tensor, ...]()
    if not isinstance(groups, str):
        given = groups or ()
        by = str(len(given))
    said = ", ".join([*words, f"groups {by}"])
    mine = [f_pos.shape[-1], f_neg.shape[-1], zlib.crc32(said.encode())]
    on_host = "cpu:" in dist.get_backend_config(process_group)
    message = torch.tensor(mine, device="cpu" if on_host else f_pos.device)
    (everyones,) = gathered(process_group, message)
    n, m, checks = everyones.T.tolist()
    if len(set(checks)) > 1:
        everyone = Ranks(process_group).from_all(said)
        raise ConfigError(
            "The ranks pass different things to the loss: "
            + "; ".join(f"rank {i} {each}" for i, each in enumerate(everyone))
            + ". Pass the same dtype, beta_star, variant, groups and log_q on every rank."
        )

    def joined(*sides: tuple[Tensor, list[int]]) -> list[Tensor]:
        """Each tensor of all ranks, in one message."""
        padded = [F.pad(x, (0, max(size) - x.shape[-1])) for x, size in sides]
        return [
            torch.cat([x[..., :k] for x, k in zip(each, size, strict=True)], -1)
            for each, (_, size) in zip(gathered(process_group, *padded), sides, strict=True)
        ]

    sides = [(f_pos, n), (f_neg, m)]
    more = [*zip(log_q or (), (n, m), strict=False), *((x, n) for x in given[2:])]
    numbers = iter(joined(*sides, *more))
    rank = dist.get_rank(process_group)
    pos, neg = (_with_own(next(numbers), f, sum(size[:rank]), len(checks)) for f, size in sides)
    log_q = None if log_q is None else (next(numbers), next(numbers))
    if given:
        # A message of their own: float32 would round large labels.
        labels = [y if y.is_floating_point() else y.long() for y in given[:2]]
        y_pos, y_neg = joined((labels[0], n), (labels[1], m))
        groups = (y_pos, y_neg) if len(given) == 2 else (y_pos, y_neg, next(numbers))
    return Batch(pos, neg, groups, log_q, (n, m))


@dataclass(frozen=True)
class Ranks:
    """The processes that train together: a process group, or None for a single process."""

    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            leave_time_at_exit()

    @property
    def are_unknown(self) -> bool:
        """Whether several processes train, and no group was given to join them."""
        in_group = dist.is_available() and dist.is_initialized()
        return self.group is None and in_group and dist.get_world_size() > 1

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def index(self) -> int:
        """Which of them this is."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that logs and writes for all."""
        return self.index == 0

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank: a plain value, and not at every step."""
        values = [value] * self.count
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values


def refuse_shards(parameters: Iterable[Tensor]) -> None:
    """Refuse, with a ``ConfigError``, parameters of which each rank holds a part."""
    # Its module takes as long to import as the rest of torch; code with such tensors has done it.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and any(isinstance(x, module.DTensor) for x in parameters):
        raise ConfigError(
            "The network's parameters are shards (DTensor, as fully_shard makes them); the guard "
            "needs whole ones. Wrap the network in DistributedDataParallel, with "
            "guard(..., process_group=...). One that is too large for that trains without a guard, "
            "by ebmguard.contrastive_loss of its energies."
        )
