"""Which samples the objective uses, and what replaces the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ..energies import SMALLEST, of_tensors

__all__ = ["log_q_at", "lowest", "masked", "usable"]

# Beyond this a product with β*, or log q, is as good as infinite.
_LARGEST = 1e30


@of_tensors
def usable(f: Tensor, beta: float | Tensor, log_q: Tensor | None = None) -> Tensor:
    """Which samples ``(..., samples)`` the objective uses: finite energies and ``|β* f| <= 1e30``.

    With ``log_q``, of the shape of ``f``, also ``|log q| <= 1e30`` where β* is not 0. ``beta``
    broadcasts against ``f``.
    """
    # A comparison with NaN is False, so one comparison finds NaN, infinities and overflow. The
    # second limit keeps sums and differences of energies finite if β* is tiny.
    f, limit = f.detach(), 1e-4 * torch.finfo(f.dtype).max
    if isinstance(beta, Tensor):
        found = ((beta * f).abs() <= _LARGEST) & (f.abs() <= limit)
    else:
        found = f.abs() <= (min(_LARGEST / abs(beta), limit) if beta else limit)
    if log_q is None:
        return found
    # The loss divides by β*, so log q / β* must be within the limit as well.
    if isinstance(beta, Tensor):
        largest: float | Tensor = (limit * beta.abs()).clamp(max=_LARGEST)
    else:
        largest = min(limit * abs(beta), _LARGEST)
    return found & (log_q_at(log_q, beta).abs() <= largest)


def log_q_at(log_q: Tensor, beta: float | Tensor) -> Tensor:
    """Log q, detached, and 0 where β* is 0: the standard loss has no weights to divide it out of.

    In float32 at least; a wider dtype of its own is kept, for its digits.
    """
    log_q = log_q.detach().to(torch.promote_types(log_q.dtype, torch.float32))
    if isinstance(beta, Tensor):
        return torch.where(beta.abs() < SMALLEST, 0.0, log_q)
    return log_q if abs(beta) >= SMALLEST else torch.zeros_like(log_q)


def masked(
    f: Tensor, beta: float | Tensor, log_q: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Which samples are usable; their energies and log q, from :func:`log_q_at`; 0 for others."""
    valid = usable(f, beta, log_q)
    f = torch.where(valid, f, 0.0)
    return valid, f, None if log_q is None else torch.where(valid, log_q, 0.0)


def lowest(x: Tensor) -> float:
    """A finite replacement of -inf, whose differences are NaN in the backward pass."""
    return torch.finfo(x.dtype).min / 16
