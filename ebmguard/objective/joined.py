"""The batch of all ranks, for losses with classes, where sums over ranks do not suffice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..energies import Groups, LogQ
from ..ranks import gathered

__all__ = ["JoinedBatch", "join"]


@dataclass(frozen=True)
class JoinedBatch:
    """All ranks' samples in the order of the ranks, detached and the same on every rank.

    Attributes:
        f_pos, f_neg: energies, ``(*models, all samples)``.
        groups: class labels.
        log_q: log-densities of the proposal, or None.
        places: the slices of this rank's positives and negatives.
    """

    f_pos: Tensor
    f_neg: Tensor
    groups: Groups
    log_q: LogQ | None
    places: tuple[slice, slice]

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

    Args:
        f_pos: this rank's energies, one per sample, ``(*models, N)``; N may differ between ranks.
        f_neg: the same for M negatives.
        groups: class labels ``(N,)`` and ``(M,)``.
        log_q: log-densities, in the shapes of the energies; on all ranks or on none.
        process_group: the ranks.
    """
    sizes = torch.tensor([f_pos.shape[-1], f_neg.shape[-1]], device=f_pos.device)
    n, m = gathered(process_group, sizes)[0].T.tolist()
    numbers = _joined(process_group, (n, m), f_pos, f_neg, *(log_q or ()))
    # A message of their own: float32 would round large labels.
    labels = _joined(
        process_group, (n, m), *(y if y.is_floating_point() else y.long() for y in groups)
    )
    rank = dist.get_rank(process_group)
    return JoinedBatch(
        f_pos=numbers[0],
        f_neg=numbers[1],
        groups=(labels[0], labels[1]),
        log_q=None if log_q is None else (numbers[2], numbers[3]),
        places=(_place(n, rank), _place(m, rank)),
    )


def _joined(
    process_group: dist.ProcessGroup, sizes: tuple[list[int], list[int]], *tensors: Tensor
) -> list[Tensor]:
    """Each tensor of all ranks, in one message; positives and negatives alternate."""
    lengths = list(islice(cycle(sizes), len(tensors)))
    padded = [
        F.pad(x, (0, max(of_ranks) - x.shape[-1]))
        for x, of_ranks in zip(tensors, lengths, strict=True)
    ]
    return [
        torch.cat([x[..., :size] for x, size in zip(everyone, of_ranks, strict=True)], -1)
        for everyone, of_ranks in zip(gathered(process_group, *padded), lengths, strict=True)
    ]


def _place(sizes: list[int], rank: int) -> slice:
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])
