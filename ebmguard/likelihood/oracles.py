"""Exact normalising constants, where something is small enough to be summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = ["enumerated_log_z", "quadrature_log_z"]

_MOST_BITS = 20
_TOGETHER = 2**14


def enumerated_log_z(
    f: Callable[[Tensor], Tensor], bits: int, *, like: Tensor | None = None
) -> Tensor:
    """log Σ exp f(h) over all h in {0, 1}^bits, up to 20 bits.

    Args:
        f: negative energy, ``(M, bits)`` to ``(M, ...)``: a number for each state, or several.
        bits: of a state; ConfigError of none, or too many.
        like: a tensor with the dtype and device of the states; None is float64 on the CPU.

    Returns:
        ``(...)`` float64.
    """
    if not 1 <= bits <= _MOST_BITS:
        raise ConfigError(f"bits is {bits}, expected 1 to {_MOST_BITS}: 2**bits states are summed")
    like = torch.empty((), dtype=torch.float64) if like is None else like
    place = torch.arange(bits, device=like.device)
    states = torch.arange(2**bits, device=like.device)[:, None]
    return _log_sum(f, states, lambda part: ((part >> place) & 1).to(like))


def quadrature_log_z(
    f: Callable[[Tensor], Tensor],
    low: Sequence[float],
    high: Sequence[float],
    *,
    points: int = 400,
    like: Tensor | None = None,
) -> Tensor:
    """log ∫ exp f(x) dx over a box in one or two dimensions, by the midpoint rule.

    Args:
        f: negative energy, ``(M, dim)`` to ``(M,)``.
        low, high: the box's corners, one or two numbers each, or ConfigError.
        points: cells a side, or ConfigError. The error falls as their square where f is smooth.
        like: as in :func:`enumerated_log_z`.

    Returns:
        0-dim, float64.
    """
    sides = [b - a for a, b in zip(low, high, strict=False)]
    if not len(low) == len(high) == len(sides) in (1, 2) or min(*sides, points) <= 0:
        raise ConfigError(
            f"low={low}, high={high}, points={points}; expected one or two numbers each, every one "
            "of high above that of low, and at least one cell a side"
        )
    like = torch.empty((), dtype=torch.float64) if like is None else like
    middle = (torch.arange(points, dtype=torch.float64, device=like.device) + 0.5) / points
    axes = [a + side * middle for a, side in zip(low, sides, strict=True)]
    grid = torch.cartesian_prod(*axes).reshape(-1, len(axes))
    cells = torch.tensor(sides, dtype=torch.float64, device=like.device) / points
    return _log_sum(f, grid, lambda part: part.to(like)) + cells.log().sum()


@torch.no_grad()
def _log_sum(
    f: Callable[[Tensor], Tensor], states: Tensor, seen: Callable[[Tensor], Tensor]
) -> Tensor:
    sums = [f(seen(part)).double().logsumexp(0) for part in torch.split(states, _TOGETHER)]
    return torch.stack(sums).logsumexp(0)
