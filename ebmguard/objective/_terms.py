"""The terms of the four losses: weights and means of energies, some of which may be unusable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..energies import SMALLEST, BetaStar, Groups, LogQ, Reduce, Variant, per_sample
from ..ranks import gathered, summed
from .finite_samples import log_q_at, lowest, masked

__all__ = ["Anchor", "Terms"]


class Anchor(NamedTuple):
    """The negative that exponents β* f - log q are relative to; 0 if no negative is usable.

    The objective does not depend on a common offset of f or of log q, but the rounding of float32
    does: both are shifted before they are combined.
    """

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


@dataclass
class Terms:
    """The terms of every variant, for energies of shape ``(*models, samples)``.

    Energies are shifted by the negative of the largest weight *before* β* multiplies them, see
    :class:`Anchor`: the largest of all ranks, or with groups of the positive's own class.
    """

    pos: Tensor  # this rank's energies, shifted unless there are groups
    neg: Tensor
    valid_pos: Tensor
    valid_neg: Tensor
    beta: float | Tensor  # with a trailing dimension, 1 or positives, where it is a tensor
    zero: Tensor | None  # entries of a β* tensor that are 0, computed at 1
    exponent: Tensor  # r⁻ = β* f⁻ - log q⁻, (*models, M), or (*models, N, M) with groups
    log_sum: Tensor  # S, (*models, 1), or (*models, N, 1) with groups
    margin: Tensor  # S - r⁺

    @classmethod
    def of(
        cls,
        f_pos: Tensor,
        f_neg: Tensor,
        beta_star: BetaStar,
        *,
        groups: Groups | None = None,
        log_q: LogQ | None = None,
        reduce: Reduce = "sum",
        process_group: dist.ProcessGroup | None = None,
        zero_at: float = 1.0,
    ) -> Terms:
        pos, neg = per_sample(f_pos, beta_star, reduce), per_sample(f_neg, beta_star, reduce)
        if zero_at and not isinstance(beta_star, Tensor) and abs(beta_star) < SMALLEST:
            beta_star = torch.zeros((), device=pos.device)
        beta, zero = beta_star, None
        if isinstance(beta_star, Tensor):
            beta_star = beta_star.to(pos)
            zero = beta_star.abs() < SMALLEST
            beta = torch.where(zero, zero_at, beta_star).unsqueeze(-1)
        q_pos = q_neg = None
        if log_q is not None:
            given = beta_star.unsqueeze(-1) if isinstance(beta_star, Tensor) else beta_star
            q_pos, q_neg = (log_q_at(side, given) for side in log_q)
        valid_neg, neg, q_neg = masked(neg, beta, q_neg)
        if groups is not None and len(groups) == 3:
            beta = beta * groups[2].to(pos)  # of each positive, and of the row of its negatives
        valid_pos, pos, q_pos = masked(pos, beta, q_pos)
        log_sum: Tensor | None = None
        seen = valid_neg
        if groups is not None:
            seen = (groups[0].unsqueeze(-1) == groups[1]) & valid_neg.unsqueeze(-2)
            partnered = seen.any(-1)
            if zero is not None:  # β* = 0 sets nobody against anybody
                partnered = partnered | zero.unsqueeze(-1)
            valid_pos = valid_pos & partnered
            # A row and an anchor for each positive: classes may lie far apart.
            rows = neg.unsqueeze(-2).expand(seen.shape)
            q_rows = None if q_neg is None else q_neg.unsqueeze(-2).expand(seen.shape)
            of_row = beta.unsqueeze(-1) if isinstance(beta, Tensor) else beta
            anchor = Anchor.of(rows, q_rows, seen, of_row)
            exponent = anchor.exponent(rows - anchor.f, q_rows, of_row)
            anchor = anchor.squeeze(-1)
            r_pos = anchor.exponent(pos - anchor.f, q_pos, beta)
        else:
            if process_group is None:
                anchor = Anchor.of(neg, q_neg, valid_neg, beta)
            else:
                anchor, log_sum = Anchor.of_ranks(neg, q_neg, valid_neg, beta, process_group)
            pos, neg = pos - anchor.f, neg - anchor.f
            exponent = anchor.exponent(neg, q_neg, beta)
            r_pos = anchor.exponent(pos, q_pos, beta)
        exponent = torch.where(seen, exponent, lowest(exponent))
        if log_sum is None:
            log_sum = torch.logsumexp(exponent, -1, keepdim=True)
        margin = (log_sum if groups is None else log_sum.squeeze(-1)) - r_pos
        return cls(pos, neg, valid_pos, valid_neg, beta, zero, exponent, log_sum, margin)

    def count(self, valid: Tensor) -> Tensor:
        """Number of usable samples, at least 1 so that an empty side divides by something."""
        return valid.sum(-1, dtype=self.pos.dtype).clamp(min=1.0)

    def mean(self, x: Tensor, valid: Tensor) -> Tensor:
        return torch.where(valid, x, 0.0).sum(-1) / self.count(valid)

    def scale_of(self, valid: Tensor) -> Tensor:
        """GradScale over some positives; ``1 - sigmoid`` has no digits left where it matters."""
        return self.mean(torch.sigmoid(self.margin), valid)

    def halves(self) -> tuple[Tensor, Tensor]:
        first = torch.arange(self.pos.shape[-1], device=self.pos.device) < self.pos.shape[-1] // 2
        return self.valid_pos & first, self.valid_pos & ~first

    def both_sides(self) -> Tensor:
        """Whether both have a usable sample. Of an empty half GradScale and mean are 0 anyway."""
        return self.valid_pos.any(-1) & self.valid_neg.any(-1)

    def no_pos(self, valid: Tensor) -> Tensor:
        return self.mean(self.margin / self.beta, valid)

    def loss(self, variant: Variant) -> Tensor:
        """The loss; 0 if a side has no usable sample."""
        if variant == "default":
            # Not softplus: torch cuts it off at 20, which would lose nine digits in float64.
            loss = self.mean(F.logsigmoid(-self.margin) / -self.beta, self.valid_pos)
        elif variant == "no_pos":
            loss = self.no_pos(self.valid_pos)
        elif variant == "batch":
            loss = self.scale_of(self.valid_pos).detach() * self.no_pos(self.valid_pos)
        else:
            first, second = self.halves()
            of_first, of_second = self.scale_of(first).detach(), self.scale_of(second).detach()
            loss = 0.5 * (of_second * self.no_pos(first) + of_first * self.no_pos(second))
        if self.zero is not None:
            plain = self.mean(self.neg, self.valid_neg) - self.mean(self.pos, self.valid_pos)
            loss = torch.where(self.zero, plain, loss)
        return torch.where(self.both_sides(), loss, 0.0)

    def coefficients(self, variant: Variant) -> tuple[Tensor, Tensor]:
        """Gradient of the loss with respect to each energy; 0 if a side is empty."""
        pull, weight = self._pull(variant), torch.exp(self.exponent - self.log_sum)
        if weight.ndim > self.neg.ndim:  # groups: each positive weighs its own class
            to_neg = (pull.unsqueeze(-1) * weight).sum(-2)
        else:
            to_neg = pull.sum(-1).unsqueeze(-1) * weight * self.valid_neg
        to_pos = -pull
        if self.zero is not None:
            zero = self.zero.unsqueeze(-1)
            to_pos = torch.where(zero, -self.share(self.valid_pos), to_pos)
            to_neg = torch.where(zero, self.share(self.valid_neg), to_neg)
        defined = self.both_sides().unsqueeze(-1)
        return torch.where(defined, to_pos, 0.0), torch.where(defined, to_neg, 0.0)

    def share(self, valid: Tensor) -> Tensor:
        """1/N on each of the N usable samples."""
        return valid / self.count(valid).unsqueeze(-1)

    def _pull(self, variant: Variant) -> Tensor:
        """How strongly each positive is pulled up: (1 - w⁺_i)/N for ``default``."""
        if variant == "default":
            return torch.sigmoid(self.margin) * self.share(self.valid_pos)
        if variant == "no_pos":
            return self.share(self.valid_pos)
        if variant == "batch":
            return self.scale_of(self.valid_pos).unsqueeze(-1) * self.share(self.valid_pos)
        first, second = self.halves()
        return 0.5 * (
            self.scale_of(second).unsqueeze(-1) * self.share(first)
            + self.scale_of(first).unsqueeze(-1) * self.share(second)
        )

    @torch.no_grad()
    def over_ranks(
        self, variant: Variant, process_group: dist.ProcessGroup
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss of all ranks' samples and the coefficients of this rank's, detached.

        Every variant sums over parts of the positives (two halves, or one whole) the weight of a
        sample times the costs. One message carries these sums.
        """
        parts = self.valid_pos.unsqueeze(0)
        if variant == "true":
            parts = torch.stack(self.halves())
        one, scale = torch.ones_like(self.margin), torch.sigmoid(self.margin)
        if variant == "default":
            cost, pull = F.logsigmoid(-self.margin) / -self.beta, scale
        else:
            cost, pull = self.margin / self.beta, one
        counts, scales, costs, m, sum_neg, sum_pos = summed(
            process_group,
            *(torch.where(parts, x, 0.0).sum(-1) for x in (one, scale, cost)),
            self.valid_neg.sum(-1, dtype=one.dtype),
            torch.where(self.valid_neg, self.neg, 0.0).sum(-1),
            torch.where(self.valid_pos, self.pos, 0.0).sum(-1),
        )
        pulls = scales if variant == "default" else counts
        each = 1 / counts.clamp(min=1.0)  # weight of a sample in each part
        if variant == "batch":
            each = each * (scales * each)
        elif variant == "true":
            each = 0.5 * each * (scales * each).flip(0)
        value = (each * costs).sum(0)
        to_pos = -pull * torch.where(parts, each.unsqueeze(-1), 0.0).sum(0)
        weight = torch.exp(self.exponent - self.log_sum) * self.valid_neg
        to_neg = (each * pulls).sum(0).unsqueeze(-1) * weight
        n = counts.sum(0)
        if self.zero is not None:
            per_pos, per_neg = 1 / n.clamp(min=1.0), 1 / m.clamp(min=1.0)
            zero = self.zero.unsqueeze(-1)
            value = torch.where(self.zero, sum_neg * per_neg - sum_pos * per_pos, value)
            to_pos = torch.where(zero, -per_pos.unsqueeze(-1) * self.valid_pos, to_pos)
            to_neg = torch.where(zero, per_neg.unsqueeze(-1) * self.valid_neg, to_neg)
        both = (n > 0) & (m > 0)
        to_pos, to_neg = (torch.where(both.unsqueeze(-1), x, 0.0) for x in (to_pos, to_neg))
        return torch.where(both, value, 0.0), (to_pos, to_neg)
