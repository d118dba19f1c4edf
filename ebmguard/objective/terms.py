"""The terms of losses, weights and their diagnostics: each formula stands here once."""

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
    """Which samples ``(..., samples)`` the objective uses: finite energies and ``|β* f| <= 1e30``.

    With ``log_q`` also ``|log q| <= 1e30`` where β* is not 0. ``beta`` broadcasts against ``f``.
    """
    at = Exponent.of(beta, f.dtype)
    # A comparison with NaN is False, so one comparison finds NaN, infinities and overflow.
    found = f.detach().abs() <= at.limit
    if log_q is None:
        return found
    # The loss divides by β*, so log q / β* must be within the limit as well.
    size = torch.as_tensor(at.beta, dtype=f.dtype, device=f.device).abs()
    largest = (1e-4 * torch.finfo(f.dtype).max * size).clamp(max=_LARGEST)
    return found & (_log_q_at(log_q, at.beta).abs() <= largest)


class Exponent(NamedTuple):
    """β*: a number, a tensor, or a column of several exponents ``(exponents, 1)``."""

    beta: float | Tensor
    limit: float | Tensor  # the largest |f| that is usable
    is_zero: bool | Tensor  # whether β* is 0
    is_up: bool  # whether β* is known not to be negative
    # Very low, since differences of -inf would be NaN when derived; and 0. Tensors are quicker.
    low: float | Tensor
    zero: float | Tensor = 0.0

    @classmethod
    def of(cls, beta: float | Tensor | Exponent, dtype: torch.dtype) -> Exponent:
        """Of energies of that dtype."""
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
    """Energies of one model, relative to the negative of the largest weight.

    A common offset of f or of log q changes the rounding of float32 alone: the two are shifted
    before β* multiplies and before they are combined, with groups within each class.

    Several exponents at once are a column ``beta`` of shape ``(exponents, 1)``: all shapes below
    then begin with ``exponents``.
    """

    f_pos: Tensor  # (N,)
    f_neg: Tensor  # (M,)
    is_pos: Tensor  # (N,), which are usable
    is_neg: Tensor  # (M,)
    is_paired: Tensor  # (N,), which are usable and have a usable negative, of their class
    beta: float | Tensor  # (), or of each positive (N,)
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
        """Of checked energies in float32 at least, see :mod:`ebmguard.energies`, without heads."""
        of_pos = of_neg = Exponent.of(beta, f_pos.dtype)
        beta = at = of_neg.beta
        q_pos, q_neg = (None, None) if log_q is None else (_log_q_at(q, beta) for q in log_q)
        is_neg = seen = usable(f_neg, of_neg, q_neg)
        per_row, rows = beta, f_neg
        if groups is not None and not isinstance(groups, str) and len(groups) == 3:
            at = beta * groups[2].to(f_pos)  # of each positive, and of the row of its negatives
            of_pos = Exponent.of(at, f_pos.dtype)
        is_pos = usable(f_pos, of_pos, q_pos)
        if groups is not None:
            per_row = at.unsqueeze(-1) if isinstance(at, Tensor) else at
            # The negatives of each positive: all of those that a label chooses, or its own.
            n = f_pos.shape[-1] if isinstance(groups, str) else 1
            rows, seen, *q = (
                x.reshape(*x.shape[:-1], n, -1) for x in (f_neg, is_neg, q_neg) if x is not None
            )
            q_neg = q[0] if q else None
            if not isinstance(groups, str):
                seen = seen & (groups[0].unsqueeze(-1) == groups[1])
        is_paired = is_pos * seen.any(-1, keepdim=groups is None)

        # What is not usable leaves behind the last product with it, so that no NaN comes back.
        low, known, q0 = of_neg.low, rows.detach(), None
        if f_neg.dtype != f_pos.dtype:
            low = Exponent.of(1.0, f_neg.dtype).low
        if q_neg is None and of_neg.is_up:
            f0 = torch.where(seen, known, low).amax(-1, keepdim=True)
        else:
            r = per_row * known if q_neg is None else per_row * known - q_neg.to(known.dtype)
            best = torch.where(seen, r, low).argmax(-1, keepdim=True)
            f0, q0 = _at(known, best), None if q_neg is None else _at(q_neg, best)
        exponent = torch.where(seen, _exponent(rows, f0, q_neg, q0, per_row), low)
        log_sum = of_row = torch.logsumexp(exponent, -1, keepdim=True)
        if groups is not None:
            f0, q0 = f0.squeeze(-1), None if q0 is None else q0.squeeze(-1)
            of_row = log_sum.squeeze(-1)
        logit = torch.where(is_paired, _exponent(f_pos, f0, q_pos, q0, at) - of_row, of_neg.zero)
        counted = is_pos if groups is None else is_paired
        count = counted.sum(-1, keepdim=True, dtype=logit.dtype)
        masks, about = (is_pos, is_neg, is_paired), (at, of_neg.is_zero, groups is not None)
        return cls(f_pos, f_neg, *masks, *about, exponent, log_sum, logit, count)

    @property
    def log_w(self) -> Tensor:
        """Logarithms of the weights, of the shape of the exponents."""
        return self.exponent - self.log_sum

    def of_negatives(self, share: Tensor) -> Tensor:
        """With groups: weights ``(M,)`` where the positives have these shares, ``(N,)``."""
        weights = share.unsqueeze(-1) * self.log_w.exp()
        is_whole = weights.shape[-1] == self.f_neg.shape[-1]
        return weights.sum(-2) if is_whole else weights.flatten(-2)

    def share(self, of: Tensor) -> Tensor:
        """1/n on each of n samples, 0 on the others."""
        if of is self.is_paired:
            return of / self.count.clamp(min=1.0)
        return of / of.sum(-1, keepdim=True, dtype=self.logit.dtype).clamp(min=1.0)

    def grad_scale(self, of: Tensor) -> Tensor:
        """GradScale over some positives, 0-dim or ``(exponents,)``."""
        # 1 - sigmoid would have no digits left where it matters.
        return (torch.sigmoid(-self.logit) * self.share(of)).sum(-1)

    def loss(self, variant: Variant) -> Tensor:
        """The loss, 0-dim or ``(exponents,)``; 0 if a side has no usable sample."""
        is_zero, beta = self.is_zero, self.beta
        if isinstance(is_zero, Tensor):
            beta = torch.where(is_zero, 1.0, beta)

        def no_pos(of: Tensor) -> Tensor:
            return (self.logit * (self.share(of) / -beta)).sum(-1)

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
            of_a, of_b = (self.grad_scale(half).detach() for half in (a, b))
            loss = 0.5 * (of_b * no_pos(a) + of_a * no_pos(b))
        if isinstance(is_zero, Tensor):  # which sets nobody against anybody, of whatever class
            sides = (self.f_pos, self.is_pos), (self.f_neg, self.is_neg)
            # A common offset does not matter, but to the rounding of float32.
            first = torch.where(self.is_neg, self.f_neg.detach(), 0.0)[..., :1]
            shares = (torch.where(of, (f - first) * self.share(of), 0.0) for f, of in sides)
            top, bottom = (x.sum(-1) for x in shares)
            both = self.is_pos.any(-1) & self.is_neg.any(-1)
            plain = torch.where(both, bottom - top, 0.0)
            loss = torch.where(is_zero.reshape(loss.shape), plain, loss)
        return loss


def _at(x: Tensor, place: Tensor) -> Tensor:
    return x.expand(*place.shape[:-1], -1).gather(-1, place)


def _exponent(
    f: Tensor, f0: Tensor, q: Tensor | None, q0: Tensor | None, beta: float | Tensor
) -> Tensor:
    """β* (f - f₀) - (log q - log q₀): the two are shifted before they are combined."""
    r = beta * (f - f0)
    return r if q is None or q0 is None else r - (q - q0).to(r.dtype)


def _log_q_at(log_q: Tensor, beta: float | Tensor) -> Tensor:
    """Log q, detached, and 0 where β* is 0: the standard loss has no weights to divide it by."""
    log_q = widened(log_q.detach())  # a wider dtype of its own is kept, for its digits
    if isinstance(beta, Tensor):
        return torch.where(beta.abs() < SMALLEST, 0.0, log_q)
    return log_q if abs(beta) >= SMALLEST else torch.zeros_like(log_q)
