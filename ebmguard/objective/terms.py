"""The terms of losses, weights and their diagnostics, with every formula once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..energies import SMALLEST, Groups, LogQ, Variant, widened

__all__ = ["Exponent", "Terms", "usable"]

# Beyond this a product with β*, or log q, is as good as infinite.
_LARGEST = 1e30


def usable(f: Tensor, beta: float | Tensor | Exponent, log_q: Tensor | None = None) -> Tensor:
    """Mark the samples ``(..., samples)`` that the objective uses: f finite and ``|β* f| <= 1e30``.

    With ``log_q`` also ``|log q| <= 1e30`` where β* is not 0. ``beta`` broadcasts against ``f``.
    """
    exponent = Exponent.of(beta, f.dtype)
    # A comparison with NaN is False, so one comparison finds NaN, infinities and overflow.
    is_usable = f.detach().abs() <= exponent.limit
    if log_q is None:
        return is_usable
    # The loss divides by β*, so log q / β* must be within the limit as well.
    size = torch.as_tensor(exponent.beta, dtype=f.dtype, device=f.device).abs()
    largest = (1e-4 * torch.finfo(f.dtype).max * size).clamp(max=_LARGEST)
    return is_usable & (_effective_log_q(log_q, exponent.beta).abs() <= largest)


class Exponent(NamedTuple):
    """The exponent β*: a number, a tensor, or a column of several exponents ``(exponents, 1)``."""

    beta: float | Tensor
    limit: float | Tensor  # the largest |f| that is usable
    is_zero: bool | Tensor  # whether β* is 0
    is_nonnegative: bool  # whether β* is known not to be negative
    low: float  # very low, since differences of -inf would be NaN when derived

    @classmethod
    def of(cls, beta: float | Tensor | Exponent, dtype: torch.dtype) -> Exponent:
        """Return the exponent for energies of this dtype."""
        if isinstance(beta, Exponent):
            return beta
        # Keeps sums and differences of energies finite if β* is tiny.
        most, low = 1e-4 * torch.finfo(dtype).max, torch.finfo(dtype).min / 16
        if isinstance(beta, Tensor):
            size = beta.to(dtype).abs()
            is_zero = size < SMALLEST
            size = torch.where(is_zero, 1.0, size)  # at which such a loss is computed
            return cls(beta, (_LARGEST / size).clamp(max=most), is_zero, False, low)
        limit = min(_LARGEST / abs(beta), most) if beta else most
        return cls(beta, limit, abs(beta) < SMALLEST, beta >= 0, low)


@dataclass(frozen=True)
class Terms:
    """The energies of one model, relative to the negative of the largest weight.

    A common offset of f or of log q changes the rounding of float32 alone: the two are shifted
    before β* multiplies and before they are combined, with groups within each class.

    Several exponents at once are a column ``beta`` of shape ``(exponents, 1)``: all shapes below
    then begin with ``exponents``.
    """

    f_pos: Tensor  # (N,)
    f_neg: Tensor  # (M,)
    is_pos: Tensor  # (N,), whether they are usable
    is_neg: Tensor  # (M,)
    is_paired: Tensor  # (N,), whether they are usable and have a usable negative, of their class
    beta: float | Tensor  # (), or one for every positive (N,)
    is_zero: bool | Tensor  # whether β* is 0, ()
    is_grouped: bool
    # r⁻ = β* f⁻ - log q⁻, (M,), with groups (N, M), in rows (N, M / N); very low where unusable.
    exponent: Tensor
    log_sum: Tensor  # S = logsumexp r⁻, (1,), or (N, 1) with groups
    logit: Tensor  # r⁺ - S, (N,): w⁺ is its sigmoid; 0 where there is no pair
    count: Tensor  # (1,), how many positives are paired; without groups, are usable

    @classmethod
    def of(
        cls,
        f_pos: Tensor,
        f_neg: Tensor,
        beta: float | Tensor | Exponent,
        groups: Groups | None = None,
        log_q: LogQ | None = None,
    ) -> Terms:
        """Compute the terms of energies without heads, checked, and in float32 at least."""
        pos_exponent = neg_exponent = Exponent.of(beta, f_pos.dtype)
        beta = pos_beta = neg_exponent.beta
        q_pos, q_neg = (None, None) if log_q is None else (_effective_log_q(q, beta) for q in log_q)
        is_neg = in_row = usable(f_neg, neg_exponent, q_neg)
        row_beta, rows = beta, f_neg
        if groups is not None and not isinstance(groups, str) and len(groups) == 3:
            pos_beta = beta * groups[2].to(f_pos)  # also of the row of a positive's negatives
            pos_exponent = Exponent.of(pos_beta, f_pos.dtype)
        is_pos = usable(f_pos, pos_exponent, q_pos)
        if groups is not None:
            row_beta = pos_beta.unsqueeze(-1) if isinstance(pos_beta, Tensor) else pos_beta
            # A positive's negatives are all that its label chooses, or those of its row.
            n = f_pos.shape[-1] if isinstance(groups, str) else 1
            rows, in_row, *q = (
                x.reshape(*x.shape[:-1], n, -1) for x in (f_neg, is_neg, q_neg) if x is not None
            )
            q_neg = q[0] if q else None
            if not isinstance(groups, str):
                in_row = in_row & (groups[0].unsqueeze(-1) == groups[1])
        is_paired = is_pos * in_row.any(-1, keepdim=groups is None)

        # What is not usable leaves behind the last product with it, so that no NaN comes back.
        low, detached, q0 = neg_exponent.low, rows.detach(), None
        if f_neg.dtype != f_pos.dtype:
            low = Exponent.of(1.0, f_neg.dtype).low
        if q_neg is None and neg_exponent.is_nonnegative:
            f0 = torch.where(in_row, detached, low).amax(-1, keepdim=True)
        else:
            r = row_beta * detached
            r = r if q_neg is None else r - q_neg.to(detached.dtype)
            best = torch.where(in_row, r, low).argmax(-1, keepdim=True)
            f0, q0 = _entry(detached, best), None if q_neg is None else _entry(q_neg, best)
        exponent = torch.where(in_row, _shifted(rows, f0, q_neg, q0, row_beta), low)
        log_sum = row_sum = torch.logsumexp(exponent, -1, keepdim=True)
        if groups is not None:
            f0, q0 = f0.squeeze(-1), None if q0 is None else q0.squeeze(-1)
            row_sum = log_sum.squeeze(-1)
        logit = _shifted(f_pos, f0, q_pos, q0, pos_beta) - row_sum
        logit = torch.where(is_paired, logit, 0.0)
        counted = is_pos if groups is None else is_paired
        count = counted.sum(-1, keepdim=True, dtype=logit.dtype)
        masks = is_pos, is_neg, is_paired
        settings = pos_beta, neg_exponent.is_zero, groups is not None
        return cls(f_pos, f_neg, *masks, *settings, exponent, log_sum, logit, count)

    @property
    def log_w(self) -> Tensor:
        """The logarithms of the weights, of the shape of the exponents."""
        return self.exponent - self.log_sum

    def negative_weights(self, share: Tensor) -> Tensor:
        """Return, with groups, weights ``(M,)`` where positives have these shares, ``(N,)``."""
        weights = share.unsqueeze(-1) * self.log_w.exp()
        is_whole = weights.shape[-1] == self.f_neg.shape[-1]
        return weights.sum(-2) if is_whole else weights.flatten(-2)

    def share(self, mask: Tensor) -> Tensor:
        """Return 1/n on the n samples of a mask, 0 on the others."""
        if mask is self.is_paired:
            return mask / self.count.clamp(min=1.0)
        return mask / mask.sum(-1, keepdim=True, dtype=self.logit.dtype).clamp(min=1.0)

    def grad_scale(self, mask: Tensor) -> Tensor:
        """Return GradScale over the positives of a mask, 0-dim or ``(exponents,)``."""
        # 1 - sigmoid would have no digits left where it matters.
        return (torch.sigmoid(-self.logit) * self.share(mask)).sum(-1)

    def loss(self, variant: Variant) -> Tensor:
        """Return the loss, 0-dim or ``(exponents,)``; 0 if a side has no usable sample."""
        is_zero, beta = self.is_zero, self.beta
        if isinstance(is_zero, Tensor):
            beta = torch.where(is_zero, 1.0, beta)

        def no_pos(mask: Tensor) -> Tensor:
            return (self.logit * (self.share(mask) / -beta)).sum(-1)

        if variant == "default":
            # Not softplus: torch cuts it off at 20, which would lose nine digits in float64.
            share = self.share(self.is_paired) / -beta
            loss = (F.logsigmoid(self.logit) * share).sum(-1)
        elif variant == "no_pos":
            loss = no_pos(self.is_paired)
        elif variant == "batch":
            loss = self.grad_scale(self.is_paired).detach() * no_pos(self.is_paired)
        else:
            n = self.f_pos.shape[-1]
            first = torch.arange(n, device=self.f_pos.device) < n // 2
            a, b = self.is_paired & first, self.is_paired & ~first
            scale_a, scale_b = (self.grad_scale(half).detach() for half in (a, b))
            loss = 0.5 * (scale_b * no_pos(a) + scale_a * no_pos(b))
        if isinstance(is_zero, Tensor):  # which sets nobody against anybody, of whatever class
            sides = (self.f_pos, self.is_pos), (self.f_neg, self.is_neg)
            # A common offset does not matter, but to the rounding of float32.
            first = torch.where(self.is_neg, self.f_neg.detach(), 0.0)[..., :1]
            shares = (torch.where(mask, (f - first) * self.share(mask), 0.0) for f, mask in sides)
            top, bottom = (x.sum(-1) for x in shares)
            both = self.is_pos.any(-1) & self.is_neg.any(-1)
            plain = torch.where(both, bottom - top, 0.0)
            loss = torch.where(is_zero.reshape(loss.shape), plain, loss)
        return loss


def _entry(x: Tensor, index: Tensor) -> Tensor:
    return x.expand(*index.shape[:-1], -1).gather(-1, index)


def _shifted(
    f: Tensor, f0: Tensor, q: Tensor | None, q0: Tensor | None, beta: float | Tensor
) -> Tensor:
    """Return β* (f - f₀) - (log q - log q₀): the two are shifted before they are combined."""
    r = beta * (f - f0)
    return r if q is None or q0 is None else r - (q - q0).to(r.dtype)


def _effective_log_q(log_q: Tensor, beta: float | Tensor) -> Tensor:
    """Return log q, detached, and 0 where β* is 0: the standard loss has no weights to divide."""
    log_q = widened(log_q.detach())  # a dtype that is wider than f's is kept, for its digits
    if isinstance(beta, Tensor):
        return torch.where(beta.abs() < SMALLEST, 0.0, log_q)
    return log_q if abs(beta) >= SMALLEST else torch.zeros_like(log_q)
