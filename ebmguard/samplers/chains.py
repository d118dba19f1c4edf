"""What every step of a sampler takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from ..errors import ConfigError, ShapeError, typed

__all__ = [
    "Chains",
    "Energy",
    "Proposal",
    "check_count",
    "check_noise",
    "check_start",
    "evaluated",
    "slope",
    "start_chains",
]

Energy: TypeAlias = Callable[[Tensor], Tensor]


class Chains(NamedTuple):
    """Where chains are, and f there. Of one f: when its parameters or β change, start anew.

    Attributes:
        x: the samples, ``(B, ...)``, or ``(*models, B, ...)`` of an ensemble.
        f: their negative energy, ``(B,)`` or ``(*models, B)``.
        grad: its gradient, in the shape of ``x``.
    """

    x: Tensor
    f: Tensor
    grad: Tensor


class Proposal(NamedTuple):
    """What a step proposed to each chain, and what became of it.

    Attributes:
        chains: where the proposals are, accepted or not.
        acceptance: probability of being accepted, ``(B,)`` or ``(*models, B)``; 1 for SGLD.
        accepted: whether they were, in the same shape.
        divergent: whether an energy was not finite on the way. MALA and HMC never accept those.
    """

    chains: Chains
    acceptance: Tensor
    accepted: Tensor
    divergent: Tensor


@typed
def start_chains(f: Energy, x0: Tensor, *, dim: int = 0) -> Chains:
    """Evaluate f and its gradient at the start points.

    Args:
        f: negative energy: ``(B, ...)`` to ``(B,)``, or ``(*models, B, ...)`` to ``(*models, B)``.
        x0: start points.
        dim: the batch dimension; 1 for ``(models, B, ...)``.

    Raises:
        ShapeError: what f returns. Each chain has one energy, so heads have to be joined first.
    """
    check_start(x0)
    return evaluated(f, x0, dim)


def evaluated(f: Energy, x: Tensor, dim: int) -> Chains:
    """:func:`start_chains` inside of loops, where its arguments have been looked at."""
    values, grad = slope(f, x)
    if values.shape != x.shape[: dim + 1]:
        raise ShapeError(
            f"f returned shape {tuple(values.shape)}; expected one number for each sample: "
            f"{tuple(x.shape[: dim + 1])}. Squeeze or sum its heads, and give the batch "
            "dimension of an ensemble as dim=."
        )
    return Chains(x.detach(), values, grad)


def slope(f: Energy, x: Tensor) -> tuple[Tensor, Tensor]:
    """What f returns at x, and the gradient of its sum, both detached."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        values = f(x)
        if not isinstance(values, Tensor) or not values.requires_grad:
            found = "a tensor without a gradient" if isinstance(values, Tensor) else repr(values)
            raise ShapeError(
                f"f returned {found[:50]}; expected a tensor of energies that depend on x"
            )
        (grad,) = torch.autograd.grad(values.sum(), x)
    return values.detach(), grad


def check_count(name: str, count: int, least: int) -> None:
    """Refuse a number of steps that is too small."""
    if count < least:
        raise ConfigError(f"{name} is {count}, expected a whole number, {least} or more")


def check_start(x0: Tensor) -> None:
    """Refuse start points that have no gradient."""
    if not x0.is_floating_point():
        raise ConfigError(f"x0 has dtype {x0.dtype}, expected floating-point start points")


def check_noise(noise: Tensor | None, shape: Sequence[int], generator: Generator | None) -> None:
    """Refuse noise that cannot be broadcast to `shape`, and a generator beside it."""
    if noise is None:
        return
    if generator is not None:
        raise ConfigError("noise and generator were both given; expected one source of noise")
    try:
        noise.expand(tuple(shape))
    except RuntimeError:
        raise ShapeError(
            f"noise has shape {tuple(noise.shape)}, which does not broadcast to {tuple(shape)}"
        ) from None
