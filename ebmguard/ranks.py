"""Messages between ranks: the whole batch, and plain values."""

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

__all__ = ["Batch", "Ranks", "gathered", "leave_time_at_exit", "refuse_shards", "whole_batch"]


@cache
def leave_time_at_exit() -> None:
    """Let gloo's threads drop their last message before Python ends, once per process.

    A thread that drops it later aborts a run that has ended well (pytorch/pytorch#190489), as long
    as anything holds the process group: DistributedDataParallel does, and so does a guard.
    """
    atexit.register(time.sleep, 0.1)


def gathered(process_group: dist.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors of every rank, along a new first dimension, detached.

    The result is the same on all ranks. The tensors are one message, in the widest of their dtypes.
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
    sizes: tuple[list[int], list[int]] = ([], [])  # the ranks' numbers of positives, of negatives


def _with_local(everyone: Tensor, local: Tensor, start: int, ranks: int) -> Tensor:
    """Put this rank's samples, with their gradient, in their place among those of all ranks.

    The gradient is multiplied by the number of ranks, by which averaging divides it.
    """
    local = local.clone()
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient * ranks)  # type: ignore[no-untyped-call]
    after = start + local.shape[-1]
    return torch.cat([everyone[..., :start], local, everyone[..., after:]], -1)


def whole_batch(
    process_group: dist.ProcessGroup, local: Batch, *, same: Sequence[object] = ()
) -> Batch:
    """Return the batch of all ranks, which is the same on every rank.

    It takes two messages, three with groups: sizes, energies with log q, labels. The host waits for
    the sizes, but not for the device if the group has a backend for the CPU.

    Args:
        local: this rank's batch, with energies ``(..., N)`` and ``(..., M)``, which may differ
            between ranks. Their gradient is that of one process after an averaging all-reduce.
        same: values that must be equal on all ranks; those of tensors are not read.

    Raises:
        ConfigError: on every rank, if they disagree on dtype, groups, log q or ``same``.
    """
    f_pos, f_neg, groups, log_q = local[:4]
    words = ["a tensor" if isinstance(x, Tensor) else repr(x) for x in same]
    words += [f"{f_pos.dtype}, {f_neg.dtype}, log_q {'with' if log_q else 'without'}"]
    kind, labels = f"in rows of {f_neg.shape[-1] // f_pos.shape[-1]}", tuple[Tensor, ...]()
    if not isinstance(groups, str):
        labels = groups or ()
        kind = str(len(labels))
    description = ", ".join([*words, f"groups {kind}"])
    facts = [f_pos.shape[-1], f_neg.shape[-1], zlib.crc32(description.encode())]
    on_host = "cpu:" in dist.get_backend_config(process_group)
    message = torch.tensor(facts, device="cpu" if on_host else f_pos.device)
    (everyones,) = gathered(process_group, message)
    n, m, checks = everyones.T.tolist()
    if len(set(checks)) > 1:
        everyone = Ranks(process_group).from_all(description)
        raise ConfigError(
            "The ranks pass different things to the loss: "
            + "; ".join(f"rank {i} {text}" for i, text in enumerate(everyone))
            + ". Pass the same dtype, beta_star, variant, groups and log_q on every rank."
        )

    def joined(*sides: tuple[Tensor, list[int]]) -> list[Tensor]:
        """Return the tensors of all ranks, sent in one message."""
        padded = [F.pad(x, (0, max(size) - x.shape[-1])) for x, size in sides]
        return [
            torch.cat([x[..., :k] for x, k in zip(parts, size, strict=True)], -1)
            for parts, (_, size) in zip(gathered(process_group, *padded), sides, strict=True)
        ]

    sides = [(f_pos, n), (f_neg, m)]
    more = [*zip(log_q or (), (n, m), strict=False), *((x, n) for x in labels[2:])]
    numbers = iter(joined(*sides, *more))
    rank = dist.get_rank(process_group)
    pos, neg = (_with_local(next(numbers), f, sum(size[:rank]), len(checks)) for f, size in sides)
    log_q = None if log_q is None else (next(numbers), next(numbers))
    if labels:
        # They need another message: float32 would round large labels.
        y_pos, y_neg = (y if y.is_floating_point() else y.long() for y in labels[:2])
        y_pos, y_neg = joined((y_pos, n), (y_neg, m))
        groups = (y_pos, y_neg) if len(labels) == 2 else (y_pos, y_neg, next(numbers))
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
        """True if several processes train, and there is no group that joins them."""
        in_group = dist.is_available() and dist.is_initialized()
        return self.group is None and in_group and dist.get_world_size() > 1

    @property
    def count(self) -> int:
        """The number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def index(self) -> int:
        """The number of this rank."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def is_first(self) -> bool:
        """True on the rank that logs and writes for all."""
        return self.index == 0

    def from_all(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks; it is too slow for every step."""
        values = [value] * self.count
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values


def refuse_shards(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters of which every rank holds a part, with a ``ConfigError``."""
    # The module is slow to import, and code with such tensors has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and any(isinstance(x, module.DTensor) for x in parameters):
        raise ConfigError(
            "The network's parameters are shards (DTensor, as fully_shard makes them); the guard "
            "needs whole ones. Wrap the network in DistributedDataParallel, with "
            "guard(..., process_group=...). One that is too large for that trains without a guard, "
            "by ebmguard.contrastive_loss of its energies."
        )
