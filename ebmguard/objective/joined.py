"""The batch of all ranks, for losses with classes, where sums over ranks do not suffice."""

from __future__ import annotations

from itertools import accumulate, cycle
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..energies import Groups, LogQ
from ..ranks import gathered

__all__ = ["JoinedBatch", "join"]


class JoinedBatch(NamedTuple):
    """All ranks' samples in the order of the ranks, detached and the same on every rank."""

    f_pos: Tensor  # energies, (*models, all samples)
    f_neg: Tensor
    groups: Groups
    log_q: LogQ | None
    places: tuple[slice, slice]  # of this rank's positives and negatives

    def own(self, of_pos: Tensor, of_neg: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of numbers per sample."""
        return of_pos[..., self.places[0]], of_neg[..., self.places[1]]


def join(
    f_pos: Tensor,
    f_neg: Tensor,
    groups: Groups,
    log_q: LogQ | None,
    process_group: dist.ProcessGroup,
) -> JoinedBatch:
    """The batch of all ranks, from three messages: sizes, energies with log q, labels.

    The host waits for the sizes, since they set the lengths of the other messages.

    Energies are ``(*models, N)`` and ``(*models, M)``; N and M may differ between ranks, and all or
    none have log q.
    """
    own = torch.tensor([f_pos.shape[-1], f_neg.shape[-1]], device=f_pos.device)
    sizes: list[list[int]] = gathered(process_group, own)[0].T.tolist()

    def joined(*sides: Tensor) -> list[Tensor]:
        """Each tensor of all ranks, in one message; positives and negatives alternate."""
        padded = [
            F.pad(x, (0, max(n) - x.shape[-1])) for x, n in zip(sides, cycle(sizes), strict=False)
        ]
        return [
            torch.cat([x[..., :size] for x, size in zip(everyone, n, strict=True)], -1)
            for everyone, n in zip(gathered(process_group, *padded), cycle(sizes), strict=False)
        ]

    numbers = joined(f_pos, f_neg, *(log_q or ()), *groups[2:])
    # A message of their own: float32 would round large labels.
    y_pos, y_neg = joined(*(y if y.is_floating_point() else y.long() for y in groups[:2]))
    rank = dist.get_rank(process_group)
    ends = [(0, *accumulate(n))[rank : rank + 2] for n in sizes]
    return JoinedBatch(
        f_pos=numbers[0],
        f_neg=numbers[1],
        groups=(y_pos, y_neg) if len(groups) == 2 else (y_pos, y_neg, numbers[-1]),
        log_q=None if log_q is None else (numbers[2], numbers[3]),
        places=(slice(*ends[0]), slice(*ends[1])),
    )
