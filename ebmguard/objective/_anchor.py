"""Exponents β* f - log q relative to the negative of the largest weight.

The objective does not depend on a common offset of f or of log q, but the rounding of float32 does:
both are shifted before they are combined.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks import gathered
from .finite_samples import lowest

__all__ = ["Anchor"]


class Anchor(NamedTuple):
    """The negative that exponents are relative to; 0 if no negative is usable."""

    f: Tensor  # its energy, (*models, 1), detached
    log_q: Tensor | None  # None if nothing is divided out

    @classmethod
    def of(
        cls,
        neg: Tensor,
        log_q: Tensor | None,
        valid: Tensor,
        beta: float | Tensor,
        dim: int = -1,
    ) -> Anchor:
        """The valid negative of the largest weight along ``dim``, which is kept with size 1."""
        f = neg.detach()
        exponent = beta * f if log_q is None else beta * f - log_q.to(f.dtype)
        index = torch.where(valid, exponent, lowest(exponent)).argmax(dim, keepdim=True)
        return cls(f.gather(dim, index), None if log_q is None else log_q.gather(dim, index))

    @classmethod
    def of_ranks(
        cls,
        neg: Tensor,
        log_q: Tensor | None,
        valid: Tensor,
        beta: float | Tensor,
        process_group: dist.ProcessGroup,
    ) -> tuple[Anchor, Tensor]:
        """The usable negative of the largest weight on any rank, and S relative to it."""
        own = cls.of(neg, log_q, valid, beta)
        exponent = own.exponent(neg.detach() - own.f, log_q, beta)
        exponent = torch.where(valid, exponent, lowest(exponent))
        log_sum = torch.logsumexp(exponent, -1, keepdim=True)
        parts = (own.f, log_sum) if own.log_q is None else (own.f, log_sum, own.log_q)
        f, log_sum, *rest = gathered(process_group, *parts)
        q = rest[0] if rest else None
        # A rank with a usable negative has an exponent of 0 relative to its own anchor.
        anchor = cls.of(f, q, log_sum >= 0, beta, 0).squeeze(0)
        return anchor, torch.logsumexp(anchor.exponent(f - anchor.f, q, beta) + log_sum, 0)

    def squeeze(self, dim: int) -> Anchor:
        return Anchor(self.f.squeeze(dim), None if self.log_q is None else self.log_q.squeeze(dim))

    def exponent(self, shifted: Tensor, log_q: Tensor | None, beta: float | Tensor) -> Tensor:
        """β* (f - f₀) - (log q - log q₀) of energies that have been shifted by f₀."""
        if log_q is None or self.log_q is None:
            return beta * shifted
        return beta * shifted - (log_q - self.log_q).to(shifted.dtype)
