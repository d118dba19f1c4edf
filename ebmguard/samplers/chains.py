"""What a step of any sampler takes and returns, and what all samplers check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from ..errors import ConfigError, ShapeError, typed

__all__ = [
    *("Chains", "Energy", "Proposal", "start_chains"),
    *("check_count", "check_noise", "evaluated", "slope"),
]

Energy: TypeAlias = Callable[[Tensor], Tensor]


class Chains(NamedTuple):
    """Where chains are, and f there. Of one f: when its parameters or β change, start anew.

    The samples x ``(B, ...)``, or ``(*models, B, ...)`` of an ensemble, their negative energy f,
    ``(B,)`` or ``(*models, B)``, and its gradient, in the shape of x.
    """

    x: Tensor
    f: Tensor
    grad: Tensor


class Proposal(NamedTuple):
    """What a step proposed to each chain, and what became of it: ``(B,)`` or ``(*models, B)``."""

    chains: Chains  # where the proposals are, accepted or not
    acceptance: Tensor  # probability of being accepted; 1 for SGLD
    accepted: Tensor  # whether they were
    divergent: Tensor  # an energy was not finite on the way: MALA and HMC do not accept it


@typed
def start_chains(f: Energy, x0: Tensor, *, dim: int = 0) -> Chains:
    """Evaluate f and its gradient at the start points x0; ConfigError of whole numbers.

    Args:
        f: negative energy: ``(B, ...)`` to ``(B,)``, or ``(*models, B, ...)`` to ``(*models, B)``;
            ShapeError of anything else, since each chain has one energy.
        x0: start points.
        dim: the batch dimension; 1 for ``(models, B, ...)``.
    """
    return evaluated(f, x0, dim)


def evaluated(f: Energy, x: Tensor, dim: int) -> Chains:
    """The chains at x, with what f returns there refused unless it is one number a sample."""
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
    if not x.is_floating_point():
        raise ConfigError(f"x0 has dtype {x.dtype}, expected floating-point start points")
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        values = f(x)
        if not isinstance(values, Tensor) or not values.requires_grad:
            found = "a tensor without a gradient" if isinstance(values, Tensor) else repr(values)
            raise ShapeError(f"f returned {found[:50]}; expected energies that depend on x")
        (grad,) = torch.autograd.grad(values.sum(), x)
    return values.detach(), grad


def check_count(name: str, count: int, least: int) -> None:
    """Refuse, with a ``ConfigError``, a number of steps or samples that is too small."""
    if count < least:
        raise ConfigError(f"{name} is {count}, expected a whole number, {least} or more")


def check_noise(noise: Tensor | None, shape: Sequence[int], generator: Generator | None) -> None:
    """Refuse noise that does not broadcast to the samples, or is given beside a generator."""
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
