"""Stochastic gradient Langevin dynamics; and the chains and proposals of any sampler's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from ..errors import ConfigError, ShapeError, typed

__all__ = [
    *("Chains", "Energy", "Proposal", "annealed", "random_steps", "sgld", "sgld_step"),
    *("start_chains", "check_count", "check_noise", "evaluate"),
]

Energy: TypeAlias = Callable[[Tensor], Tensor]
Shape: TypeAlias = Literal["linear", "geometric", "cosine"]


class Chains(NamedTuple):
    """The places of chains, and f there. When parameters of f or β change, start anew.

    The samples x ``(B, ...)``, or ``(*models, B, ...)`` of an ensemble, their negative energy f,
    ``(B,)`` or ``(*models, B)``, and its gradient, in the shape of x.
    """

    x: Tensor
    f: Tensor
    grad: Tensor


class Proposal(NamedTuple):
    """The proposals of a step, and whether chains took them: ``(B,)`` or ``(*models, B)``."""

    chains: Chains  # where the proposals are, accepted or not
    acceptance: Tensor  # probability of being accepted; 1 for SGLD
    accepted: Tensor  # whether they were
    divergent: Tensor  # an energy was not finite on the way: MALA and HMC do not accept it


@typed
def start_chains(f: Energy, x0: Tensor, *, dim: int = 0) -> Chains:
    """Evaluate f and its gradient at the start points x0; whole numbers are a ConfigError.

    Args:
        f: negative energy: ``(B, ...)`` to ``(B,)``, or ``(*models, B, ...)`` to ``(*models, B)``;
            anything else is a ShapeError, since a chain has one energy.
        x0: start points.
        dim: the batch dimension; 1 for ``(models, B, ...)``.
    """
    return evaluate(f, x0, dim)


def evaluate(f: Energy, x: Tensor, dim: int) -> Chains:
    """Return the chains at x; refuse what f returns there unless it is one number a sample."""
    values, grad = value_and_gradient(f, x)
    if values.shape != x.shape[: dim + 1]:
        raise ShapeError(
            f"f returned shape {tuple(values.shape)}; expected one number for each sample: "
            f"{tuple(x.shape[: dim + 1])}. Squeeze or sum its heads, and give the batch "
            "dimension of an ensemble as dim=."
        )
    return Chains(x.detach(), values, grad)


def value_and_gradient(f: Energy, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return f at x and the gradient of its sum, both detached."""
    if not x.is_floating_point():
        raise ConfigError(f"x0 has dtype {x.dtype}, expected floating-point start points")
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        values = f(x)
        if not isinstance(values, Tensor) or not values.requires_grad:
            result = "a tensor without a gradient" if isinstance(values, Tensor) else repr(values)
            raise ShapeError(f"f returned {result[:50]}; expected energies that depend on x")
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


@typed
def sgld_step(
    f: Energy,
    chains: Chains,
    *,
    step_size: float,
    noise_std: float,
    generator: Generator | None = None,
    noise: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    grad_clip: float | None = None,
) -> tuple[Chains, Proposal]:
    """Take one Langevin step: x + step_size * grad + noise_std * z, with z ~ N(0, I).

    The update of JEM's sampler: a correct Langevin step for p(x) ∝ exp(o f(x)) with
    o = 2 step_size / noise_std**2 (Welling and Teh 2011, Eq. 4, without minibatching). Every move
    is accepted, and f is evaluated where it ends. Change the gradient between two steps with
    ``chains._replace(grad=...)``; another shape is a ShapeError. `noise` is broadcast to the shape
    of x; other arguments and errors are as in :func:`start_chains` and :func:`sgld`.
    """
    move = _update(1, step_size, noise_std, generator, clamp, grad_clip)
    check_noise(noise, chains.x.shape, generator)
    if chains.grad.shape != chains.x.shape:
        raise ShapeError(
            f"grad has shape {tuple(chains.grad.shape)} and x has {tuple(chains.x.shape)}; "
            "expected one gradient entry for each entry of x"
        )
    end = evaluate(f, move(0, chains.x, chains.grad, noise), chains.f.ndim - 1)
    one = torch.ones_like(end.f)
    return end, Proposal(end, one, one.bool(), ~torch.isfinite(end.f))


@typed
def sgld(
    f: Energy,
    x0: Tensor,
    *,
    steps: int,
    step_size: float | Sequence[float],
    noise_std: float | Sequence[float],
    generator: Generator | None = None,
    clamp: tuple[float, float] | None = None,
    grad_clip: float | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Run `steps` Langevin steps from `x0` towards high `f`; its parameters' gradients stay.

    Args:
        f: negative energy: (B, ...) to (B,), or (models, B, ...) to (models, B) of an ensemble.
        x0: start points, of any shape that f takes.
        steps: at least 0.
        step_size: factor of the gradient; one number, or one a step (see :func:`annealed`).
        noise_std: standard deviation of the noise, in units of `x0`; likewise. 0 draws nothing.
        generator: source of the noise, on the device of `x0`; None is PyTorch's global one.
        clamp: (low, high) of the samples after every step; None leaves them free.
        grad_clip: bound of the gradient's entries, before `step_size` multiplies them (IGEBM:
            0.01). Where it cuts, the chains sample no known density, and tempering f does not slow
            them down.
        noise: standard normal draws, (steps, *x0.shape), instead of a generator; dimensions of
            `x0` may be 1. The chain can then be captured as a CUDA graph.

    Returns:
        Detached samples, in the shape of `x0`.

    Raises:
        ConfigError: a setting out of range, both `noise` and `generator`, or `x0` of whole numbers.
        ShapeError: `noise` has another shape.
    """
    move = _update(steps, step_size, noise_std, generator, clamp, grad_clip)
    check_noise(noise, (steps, *x0.shape), generator)
    if noise is not None and (noise.ndim != x0.ndim + 1 or noise.shape[0] != steps):
        raise ShapeError(
            f"noise has shape {tuple(noise.shape)}; expected draws for {steps} steps: "
            f"{(steps, *x0.shape)}"
        )
    x = x0.detach()
    for step in range(steps):
        gradient = value_and_gradient(f, x)[1]
        x = move(step, x, gradient, None if noise is None else noise[step])
    return x


@typed
def annealed(first: float, last: float, steps: int, *, shape: Shape = "geometric") -> list[float]:
    """Return a number for every step of a chain, from `first` down or up to `last`.

    For ``step_size`` and ``noise_std`` of :func:`sgld`. A chain that is to follow exp(o f) all the
    way has the steps ``[o / 2 * noise**2 for noise in annealed(...)]``.

    Args:
        first, last: numbers of the first and the last step; a single step has the last.
        steps: how many, at least 0.
        shape: "geometric", by the same factor at every step; "linear"; "cosine", flat at both ends.

    Raises:
        ConfigError: an unknown shape, negative steps, ends that are not finite, or not above 0
            where the shape is geometric.
    """
    check_count("steps", steps, 0)
    if not (math.isfinite(first) and math.isfinite(last)):
        raise ConfigError(f"first is {first} and last is {last}, expected finite numbers")
    ways = [step / (steps - 1) if steps > 1 else 1.0 for step in range(steps)]
    if shape == "geometric":
        if not min(first, last) > 0:
            raise ConfigError(
                f"first is {first} and last is {last}; a geometric shape is for numbers above 0. "
                'Use "linear" or "cosine".'
            )
        return [first ** (1 - way) * last**way for way in ways]
    if shape == "cosine":
        ways = [0.5 - 0.5 * math.cos(math.pi * way) for way in ways]
    return [(1 - way) * first + way * last for way in ways]


@typed
def random_steps(low: int, high: int, generator: Generator) -> int:
    """Draw the number of steps of a chain, uniform on {low, ..., high}.

    Raises:
        ConfigError: not 0 <= low <= high, or a generator on a GPU, which would be waited for.
    """
    if not 0 <= low <= high:
        raise ConfigError(f"low is {low} and high is {high}, expected 0 <= low <= high")
    if generator.device.type != "cpu":
        raise ConfigError(f"generator is on {generator.device}, expected one on the CPU")
    return int(torch.randint(low, high + 1, (), generator=generator))


def _update(
    steps: int,
    step_size: float | Sequence[float],
    noise_std: float | Sequence[float],
    generator: Generator | None,
    clamp: tuple[float, float] | None,
    grad_clip: float | None,
) -> Callable[[int, Tensor, Tensor, Tensor | None], Tensor]:
    check_count("steps", steps, 0)
    sizes: dict[str, Any] = {"step_size": step_size, "noise_std": noise_std}
    for name, setting in sizes.items():
        values: Any = setting if isinstance(setting, Sequence) else [setting]
        for value in values:
            if not 0 <= float(value) < math.inf:
                raise ConfigError(f"{name} is {value}, expected a finite number, 0 or more")
        sizes[name] = values if values is setting else values * steps
        if len(sizes[name]) != steps:
            raise ConfigError(f"{name} has {len(values)} entries for {steps} steps")
    if clamp is not None and not clamp[0] < clamp[1]:
        raise ConfigError(f"clamp is {clamp}, expected (low, high) with low < high")
    if grad_clip is not None and not 0 < grad_clip < math.inf:
        raise ConfigError(f"grad_clip is {grad_clip}, expected a finite number above 0, or None")

    def move(step: int, x: Tensor, grad: Tensor, noise: Tensor | None) -> Tensor:
        if grad_clip is not None:
            grad = grad.clamp(-grad_clip, grad_clip)
        moved = torch.add(x, grad, alpha=sizes["step_size"][step])
        if (std := sizes["noise_std"][step]) != 0:
            if noise is None:
                noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
            moved.add_(noise, alpha=std)
        return moved if clamp is None else moved.clamp_(*clamp)

    return move
