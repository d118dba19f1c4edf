"""Stochastic gradient Langevin dynamics on a negative energy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from .chains import Chains, Proposal, check_count, check_noise, start_chains

__all__ = ["sgld", "sgld_step"]


def sgld_step(
    f: Callable[[Tensor], Tensor],
    chains: Chains,
    *,
    step_size: float,
    noise_std: float,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    grad_clip: float | None = None,
) -> tuple[Chains, Proposal]:
    """One Langevin step: x + step_size * grad + noise_std * z, with z ~ N(0, I).

    This is the update of JEM's sampler, with step and noise set apart. It is a correct Langevin
    step for p(x) ∝ exp(o f(x)) with o = 2 step_size / noise_std**2 (Welling and Teh 2011, Eq. 4,
    without minibatching). Every move is accepted, and f evaluated where it ends. A rule of your own
    for the gradient goes between two steps: ``chains._replace(grad=...)``.

    Args:
        f: negative energy, as in :func:`ebmguard.samplers.start_chains`.
        chains: the present state.
        step_size: factor of the gradient.
        noise_std: standard deviation of the noise, in units of `x`; 0 draws no random numbers.
        generator: source of the noise, on the device of `x`; None is PyTorch's global one.
        noise: z itself, instead of a generator; broadcast to the shape of `x`, so that the members
            of an ensemble may share it. No random numbers are drawn then.
        clamp, grad_clip: as in :func:`sgld`.

    Returns:
        the new state, detached, and what happened. No input is changed.

    Raises:
        ShapeError: the shapes differ.
        ConfigError: as for :func:`sgld`.
    """
    _of_each_step("step_size", step_size, 1)
    _of_each_step("noise_std", noise_std, 1)
    _check_limits(clamp, grad_clip)
    check_noise(noise, chains.x.shape, generator)
    if chains.grad.shape != chains.x.shape:
        raise ShapeError(
            f"grad has shape {tuple(chains.grad.shape)} and x has {tuple(chains.x.shape)}; "
            "expected one gradient entry for each entry of x"
        )
    moved = _move(chains.x, chains.grad, step_size, noise_std, generator, noise, clamp, grad_clip)
    end = start_chains(f, moved, dim=chains.f.ndim - 1)
    accepted = torch.ones_like(end.f, dtype=torch.bool)
    return end, Proposal(end, torch.ones_like(end.f), accepted, ~torch.isfinite(end.f))


def sgld(
    f: Callable[[Tensor], Tensor],
    x0: Tensor,
    *,
    steps: int,
    step_size: float | Sequence[float],
    noise_std: float | Sequence[float],
    generator: torch.Generator | None = None,
    clamp: tuple[float, float] | None = None,
    grad_clip: float | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Run `steps` Langevin steps from `x0` towards high `f`.

    Only the gradient with respect to the samples is computed: the gradients stored in the
    parameters of `f` are not touched.

    Args:
        f: negative energy, one value for each sample, in any shape: (B, ...) -> (B,), or
            (models, B, ...) -> (models, B) of an ensemble.
        x0: start points, of any shape that f takes.
        steps: number of steps, at least 0.
        step_size: factor of the gradient; one number, or one for each step (see
            :func:`ebmguard.samplers.annealed`).
        noise_std: standard deviation of the noise; likewise.
        generator: source of the noise, on the device of `x0`.
        clamp: (low, high) applied to the samples after each step; None leaves them free, as JEM.
        grad_clip: largest absolute value of an entry of the gradient, before `step_size`
            multiplies it; larger ones are cut to it (IGEBM: 0.01). Where it cuts, the step no
            longer depends on how steep f is: the chains sample no density that is known, and
            tempering f does not slow them down.
        noise: standard normal draws, (steps, *x0.shape), instead of a generator; dimensions of
            `x0` may be 1, so that the members of an ensemble share them. No random numbers are
            drawn then, and the chain is a function of its tensors: it can be captured as a CUDA
            graph.

    Returns:
        Detached samples, in the shape of `x0`.

    Raises:
        ConfigError: a setting is negative or not finite, or not one for each step, `clamp` is not
            an interval, or both `noise` and `generator` are given.
        ShapeError: `noise` has another shape.
    """
    step_sizes = _of_each_step("step_size", step_size, steps)
    noise_stds = _of_each_step("noise_std", noise_std, steps)
    _check_limits(clamp, grad_clip)
    check_noise(noise, (steps, *x0.shape), generator)
    if noise is not None and (noise.ndim != x0.ndim + 1 or noise.shape[0] != steps):
        raise ShapeError(
            f"noise has shape {tuple(noise.shape)}; expected draws of their own for each of the "
            f"{steps} steps: {(steps, *x0.shape)}"
        )
    x = x0.detach()  # a new tensor on the same storage: x0 itself never requires a gradient
    for step in range(steps):
        x.requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(f(x).sum(), x)
        z = None if noise is None else noise[step]
        x = x.detach()
        x = _move(x, grad, step_sizes[step], noise_stds[step], generator, z, clamp, grad_clip)
    return x


def _move(
    x: Tensor,
    grad: Tensor,
    step_size: float,
    noise_std: float,
    generator: torch.Generator | None,
    noise: Tensor | None,
    clamp: tuple[float, float] | None,
    grad_clip: float | None,
) -> Tensor:
    """The update alone, of checked settings."""
    if grad_clip is not None:
        grad = grad.clamp(-grad_clip, grad_clip)
    moved = torch.add(x, grad, alpha=step_size)
    if noise_std != 0:
        if noise is None:
            noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        moved.add_(noise, alpha=noise_std)
    return moved if clamp is None else moved.clamp_(*clamp)


def _of_each_step(name: str, setting: float | Sequence[float], steps: int) -> Sequence[float]:
    check_count("steps", steps, 0)
    given: Sequence[Any] = setting if isinstance(setting, Sequence) else [setting] * max(steps, 1)
    for value in given:
        if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise ConfigError(
                f"{name} is {value}, expected a finite number, 0 or more, or a list of them, one "
                "for each step (of a tensor or an array, its tolist())"
            )
    if given is setting and len(given) != steps:
        raise ConfigError(
            f"{name} has {len(given)} entries for {steps} steps, expected one number or one for "
            "each step"
        )
    return given


def _check_limits(clamp: tuple[float, float] | None, grad_clip: float | None) -> None:
    if clamp is not None and not clamp[0] < clamp[1]:
        raise ConfigError(f"clamp is {clamp}, expected (low, high) with low < high")
    if grad_clip is not None and not (math.isfinite(grad_clip) and grad_clip > 0):
        raise ConfigError(f"grad_clip is {grad_clip}, expected a finite number above 0, or None")
