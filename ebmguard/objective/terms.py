"""The terms of which loss, weights and their diagnostics are made: each formula stands here once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..energies import SMALLEST, Groups, LogQ, Variant

__all__ = ["Terms", "usable"]

# Beyond this a product with β*, or log q, is as good as infinite.
_LARGEST = 1e30


def usable(f: Tensor, beta: float | Tensor, log_q: Tensor | None = None) -> Tensor:
    """Which samples ``(..., samples)`` the objective uses: finite energies and ``|β* f| <= 1e30``.

    With ``log_q``, of the shape of ``f``, also ``|log q| <= 1e30`` where β* is not 0. ``beta``
    broadcasts against ``f``.
    """
    # A comparison with NaN is False, so one comparison finds NaN, infinities and overflow. The
    # second limit keeps sums and differences of energies finite if β* is tiny.
    f, limit = f.detach(), 1e-4 * torch.finfo(f.dtype).max
    if isinstance(beta, Tensor):
        size = beta.abs()
        found = f.abs() <= (_LARGEST / size).clamp(max=limit)
        # The loss divides by β*, so log q / β* must be within the limit as well.
        largest: float | Tensor = (limit * size).clamp(max=_LARGEST)
    else:
        found = f.abs() <= (min(_LARGEST / abs(beta), limit) if beta else limit)
        largest = min(limit * abs(beta), _LARGEST)
    return found if log_q is None else found & (_log_q_at(log_q, beta).abs() <= largest)


@dataclass(frozen=True)
class Terms:
    """Energies of one model, relative to the negative of the largest weight.

    The objective does not depend on a common offset of f or of log q, but the rounding of float32
    does: the two are shifted before β* multiplies and before they are combined. With groups each
    positive has an anchor of its own class, since classes may lie far apart.

    Several exponents at once are a column ``beta`` of shape ``(exponents, 1)``: all shapes below
    then begin with ``exponents``.
    """

    f_pos: Tensor  # (N,), 0 where it is not usable; shifted unless there are groups
    f_neg: Tensor  # (M,)
    is_pos: Tensor  # (N,), which are usable, and have a negative
    is_neg: Tensor  # (M,)
    beta: float | Tensor  # (), or of each positive (N,)
    is_zero: bool | Tensor  # whether β* is 0, ()
    same: Tensor | None  # (N, M) pairs of one class, with groups
    exponent: Tensor  # r⁻ = β* f⁻ - log q⁻, (M,), or (N, M) with groups; very low where unusable
    log_sum: Tensor  # S = logsumexp r⁻, (1,), or (N,) with groups
    logit: Tensor  # r⁺ - S, (N,): w⁺ is its sigmoid

    @classmethod
    def of(
        cls,
        f_pos: Tensor,
        f_neg: Tensor,
        beta: float | Tensor,
        groups: Groups | None = None,
        log_q: LogQ | None = None,
    ) -> Terms:
        """Of checked energies in float32 at least, see :mod:`ebmguard.energies`, without heads."""
        q_pos, q_neg = (None, None) if log_q is None else (_log_q_at(q, beta) for q in log_q)
        is_zero = beta.abs() < SMALLEST if isinstance(beta, Tensor) else abs(beta) < SMALLEST
        is_neg = seen = usable(f_neg, beta, q_neg)
        at, per_row = beta, beta
        if groups is not None and len(groups) == 3:
            at = beta * groups[2].to(f_pos)  # of each positive, and of the row of its negatives
        is_pos = usable(f_pos, at, q_pos)
        f_pos, f_neg = torch.where(is_pos, f_pos, 0.0), torch.where(is_neg, f_neg, 0.0)
        rows, same = f_neg, None
        if q_pos is not None and q_neg is not None:
            q_pos, q_neg = torch.where(is_pos, q_pos, 0.0), torch.where(is_neg, q_neg, 0.0)
        if groups is not None:
            same = groups[0].unsqueeze(-1) == groups[1]
            per_row = at.unsqueeze(-1) if isinstance(at, Tensor) else at
            rows, seen = f_neg.unsqueeze(-2), same & is_neg.unsqueeze(-2)
            q_neg = None if q_neg is None else q_neg.unsqueeze(-2)
        has_negative = seen.any(-1, keepdim=groups is None)
        if same is not None and not isinstance(is_zero, bool):
            # β* = 0 sets nobody against anybody.
            has_negative = has_negative | (is_zero & is_neg.any(-1, keepdim=True))
        is_pos = is_pos & has_negative

        low = torch.finfo(rows.dtype).min / 16  # differences of -inf would be NaN when derived
        r = per_row * rows.detach()
        r = r if q_neg is None else r - q_neg.to(r.dtype)
        best = torch.where(seen, r, low).argmax(-1, keepdim=True)
        f0, q0 = _at(rows.detach(), best), None if q_neg is None else _at(q_neg, best)
        rows = rows - f0
        exponent = torch.where(seen, _exponent(rows, q_neg, q0, per_row), low)
        log_sum = torch.logsumexp(exponent, -1, keepdim=groups is None)
        if groups is not None:
            f0, q0 = f0.squeeze(-1), None if q0 is None else q0.squeeze(-1)
        shifted = f_pos - f0
        logit = _exponent(shifted, q_pos, q0, at) - log_sum
        if groups is None:
            f_pos, f_neg = shifted, rows
        return cls(f_pos, f_neg, is_pos, is_neg, at, is_zero, same, exponent, log_sum, logit)

    def share(self, of: Tensor) -> Tensor:
        """1/n on each of n samples, 0 on the others."""
        return of / of.sum(-1, keepdim=True, dtype=self.logit.dtype).clamp(min=1.0)

    def grad_scale(self, of: Tensor) -> Tensor:
        """GradScale over some positives; ``1 - sigmoid`` has no digits left where it matters."""
        return (torch.sigmoid(-self.logit.detach()) * self.share(of)).sum(-1)

    def loss(self, variant: Variant) -> Tensor:
        """The loss, 0-dim or ``(exponents,)``; 0 if a side has no usable sample."""
        is_zero, beta = self.is_zero, self.beta
        if isinstance(is_zero, Tensor):
            beta = torch.where(is_zero, 1.0, beta)

        def no_pos(of: Tensor) -> Tensor:
            return (self.logit * (self.share(of) / -beta)).sum(-1)

        if variant == "default":
            # Not softplus: torch cuts it off at 20, which would lose nine digits in float64.
            loss = (F.logsigmoid(self.logit) * (self.share(self.is_pos) / -beta)).sum(-1)
        elif variant == "no_pos":
            loss = no_pos(self.is_pos)
        elif variant == "batch":
            loss = self.grad_scale(self.is_pos) * no_pos(self.is_pos)
        else:
            n = self.f_pos.shape[-1]
            first = torch.arange(n, device=self.f_pos.device) < n // 2
            a, b = self.is_pos & first, self.is_pos & ~first
            loss = 0.5 * (self.grad_scale(b) * no_pos(a) + self.grad_scale(a) * no_pos(b))
        if isinstance(is_zero, Tensor):
            of_pos, of_neg = self.share(self.is_pos), self.share(self.is_neg)
            plain = (self.f_neg * of_neg).sum(-1) - (self.f_pos * of_pos).sum(-1)
            plain = torch.where(self.is_pos.any(-1), plain, 0.0)
            loss = torch.where(is_zero.reshape(loss.shape), plain, loss)
        return loss


def _at(x: Tensor, place: Tensor) -> Tensor:
    return x.expand(*place.shape[:-1], -1).gather(-1, place)


def _exponent(f: Tensor, q: Tensor | None, q0: Tensor | None, beta: float | Tensor) -> Tensor:
    """β* (f - f₀) - (log q - log q₀) of energies that have been shifted by f₀."""
    r = beta * f
    return r if q is None or q0 is None else r - (q - q0).to(r.dtype)


def _log_q_at(log_q: Tensor, beta: float | Tensor) -> Tensor:
    """Log q, detached, and 0 where β* is 0: the standard loss has no weights to divide it out of.

    In float32 at least; a wider dtype of its own is kept, for its digits.
    """
    log_q = log_q.detach().to(torch.promote_types(log_q.dtype, torch.float32))
    if isinstance(beta, Tensor):
        return torch.where(beta.abs() < SMALLEST, 0.0, log_q)
    return log_q if abs(beta) >= SMALLEST else torch.zeros_like(log_q)
