"""Exponents β* f - log q relative to the negative of the largest weight, here or on any rank.

The objective does not depend on a common offset, of f or of log q, but float32 does: both are
shifted before they meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks import gathered
from .finite_samples import void

__all__ = ["Anchor"]


@dataclass
class Anchor:
    """The negative that exponents are relative to; 0 where no negative is usable.

    Attributes:
        f: its energy, ``(*models, 1)``, detached.
        log_q: log q of it, or None where nothing is divided out.
    """

    f: Tensor
    log_q: Tensor | None

    @classmethod
    def of(
        cls, neg: Tensor, valid: Tensor, beta: float | Tensor, log_q: Tensor | None = None
    ) -> Anchor:
        """The usable negative of the largest weight.

        Args:
            neg: energies, 0 where they are not usable, ``(*models, M)``.
            valid: which are.
            beta: β*, broadcastable against ``neg``.
            log_q: as :func:`in_force` has it, 0 where the sample is not usable.
        """
        return _best(neg.detach(), log_q, valid, beta, -1)

    @classmethod
    def of_ranks(
        cls,
        neg: Tensor,
        valid: Tensor,
        beta: float | Tensor,
        log_q: Tensor | None,
        process_group: dist.ProcessGroup,
    ) -> tuple[Anchor, Tensor]:
        """The usable negative of the largest weight on any rank, and S relative to it.

        Args, beside the above:
            process_group: the ranks. Two numbers per model travel, or three with log q.
        """
        own = cls.of(neg, valid, beta, log_q)
        exponent = own.exponent(neg.detach() - own.f, log_q, beta)
        exponent = torch.where(valid, exponent, void(exponent))
        log_sum = torch.logsumexp(exponent, -1, keepdim=True)
        parts = (own.f, log_sum) if own.log_q is None else (own.f, log_sum, own.log_q)
        f, log_sum, *rest = gathered(process_group, *parts)
        q = rest[0] if rest else None
        # Relative to its own anchor a rank has an exponent of 0, if it has a usable negative.
        anchor = _best(f, q, log_sum >= 0, beta, 0).squeeze(0)
        return anchor, torch.logsumexp(anchor.exponent(f - anchor.f, q, beta) + log_sum, 0)

    def squeeze(self, dim: int) -> Anchor:
        return Anchor(self.f.squeeze(dim), None if self.log_q is None else self.log_q.squeeze(dim))

    def exponent(self, shifted: Tensor, log_q: Tensor | None, beta: float | Tensor) -> Tensor:
        """β* (f - f₀) - (log q - log q₀) of energies that have been shifted by f₀."""
        if log_q is None or self.log_q is None:
            return beta * shifted
        return beta * shifted - (log_q - self.log_q).to(shifted.dtype)


def _best(f: Tensor, log_q: Tensor | None, valid: Tensor, beta: float | Tensor, dim: int) -> Anchor:
    """Of the largest weight among the valid ones along a dimension, which stays as one of 1."""
    exponent = beta * f if log_q is None else beta * f - log_q.to(f.dtype)
    index = torch.where(valid, exponent, void(exponent)).argmax(dim, keepdim=True)
    return Anchor(f.gather(dim, index), None if log_q is None else log_q.gather(dim, index))
