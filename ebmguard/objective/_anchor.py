"""Exponents β* f - log q relative to the negative of the largest weight, here or on any rank.

The objective does not depend on a common offset, of f or of log q, but float32 does: both are
shifted before they meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ._ranks import gathered
from ._usable import void

__all__ = ["Anchor"]


@dataclass(frozen=True)
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
        neg = neg.detach()
        exponent = beta * neg if log_q is None else beta * neg - log_q.to(neg.dtype)
        return cls(neg, log_q)._at(_best(exponent, valid, -1), -1)

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
        each = cls(f, rest[0] if rest else None)
        exponent = beta * f if each.log_q is None else beta * f - each.log_q.to(f.dtype)
        # Relative to its own anchor a rank has an exponent of 0, if it has a usable negative.
        best = each._at(_best(exponent, log_sum >= 0, 0), 0)
        best = cls(best.f.squeeze(0), None if best.log_q is None else best.log_q.squeeze(0))
        log_sum = torch.logsumexp(best.exponent(f - best.f, each.log_q, beta) + log_sum, 0)
        return best, log_sum

    def exponent(self, shifted: Tensor, log_q: Tensor | None, beta: float | Tensor) -> Tensor:
        """β* (f - f₀) - (log q - log q₀) of energies that have been shifted by f₀."""
        if log_q is None or self.log_q is None:
            return beta * shifted
        return beta * shifted - (log_q - self.log_q).to(shifted.dtype)

    def _at(self, index: Tensor, dim: int) -> Anchor:
        log_q = None if self.log_q is None else self.log_q.gather(dim, index)
        return Anchor(self.f.gather(dim, index), log_q)


def _best(exponent: Tensor, valid: Tensor, dim: int) -> Tensor:
    return torch.where(valid, exponent, void(exponent)).argmax(dim, keepdim=True)
