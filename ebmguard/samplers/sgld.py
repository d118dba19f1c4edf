"""Stochastic gradient Langevin dynamics on a negative energy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError

__all__ = ["sgld", "sgld_step"]


def sgld_step(
    x: Tensor,
    grad: Tensor,
    *,
    step_size: float,
    noise_std: float,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """One Langevin step: x + step_size * grad + noise_std * z, with z ~ N(0, I).

    This is the update of JEM's sampler, with step and noise set apart. It is a correct Langevin
    step for p(x) ∝ exp(o f(x)) with o = 2 step_size / noise_std**2 (Welling and Teh 2011, Eq. 4,
    without minibatching).

    Args:
        x: samples, of any shape: (B, ...), or (models, B, ...) of an ensemble.
        grad: gradient of the negative energy f at `x`, same shape.
        step_size: factor of the gradient.
        noise_std: standard deviation of the noise, in units of `x`; 0 draws no random numbers.
        generator: source of the noise, on the device of `x`; None is PyTorch's global one.
        noise: z itself, in the place of a generator; broadcast to the shape of `x`, so that the
            members of an ensemble may share it. No random numbers are drawn then.

    Returns:
        The new samples, in the shape of `x`. No input is changed.

    Raises:
        ShapeError: the shapes differ.
        ConfigError: both `noise` and `generator` are given.
    """
    check_noise(noise, x.shape, generator)
    if grad.shape != x.shape:
        raise ShapeError(
            f"grad has shape {tuple(grad.shape)} and x has {tuple(x.shape)}; "
            "expected one gradient entry for each entry of x"
        )
    moved = torch.add(x, grad, alpha=step_size)
    if noise_std == 0:
        return moved
    if noise is None:
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    return moved.add_(noise, alpha=noise_std)


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
        noise: standard normal draws, (steps, *x0.shape), in the place of a generator; dimensions
            of `x0` may be 1, so that the members of an ensemble share them. No random numbers are
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
        if grad_clip is not None:
            grad = grad.clamp(-grad_clip, grad_clip)
        x = sgld_step(
            x.detach(),
            grad,
            step_size=step_sizes[step],
            noise_std=noise_stds[step],
            generator=generator,
            noise=None if noise is None else noise[step],
        )
        if clamp is not None:
            x.clamp_(*clamp)
    return x


def _of_each_step(name: str, setting: float | Sequence[float], steps: int) -> Sequence[float]:
    if steps < 0:
        raise ConfigError(f"steps is {steps}, expected 0 or more")
    given = setting if isinstance(setting, Sequence) else [setting]
    for value in given:
        _check_size(name, value)
    if given is not setting:
        return list(given) * steps
    if len(given) != steps:
        raise ConfigError(
            f"{name} has {len(given)} entries for {steps} steps, expected one number or one for "
            "each step"
        )
    return given


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ConfigError(
            f"{name} is {value}, expected a finite number, 0 or more, or a list of them, one for "
            "each step (of a tensor or an array, its tolist())"
        )


def _check_limits(clamp: tuple[float, float] | None, grad_clip: float | None) -> None:
    if clamp is not None and not clamp[0] < clamp[1]:
        raise ConfigError(f"clamp is {clamp}, expected (low, high) with low < high")
    if grad_clip is not None and not (math.isfinite(grad_clip) and grad_clip > 0):
        raise ConfigError(f"grad_clip is {grad_clip}, expected a finite number above 0, or None")


def check_noise(
    noise: Tensor | None, shape: Sequence[int], generator: torch.Generator | None
) -> None:
    """Refuse noise that cannot be broadcast to `shape`, and a generator beside it."""
    if noise is None:
        return
    if generator is not None:
        raise ConfigError("noise and generator were both given; expected one source of noise")
    # From the right, as broadcasting does.
    pairs = zip(reversed(noise.shape), reversed(shape), strict=False)
    if noise.ndim > len(shape) or any(own not in (1, size) for own, size in pairs):
        raise ShapeError(
            f"noise has shape {tuple(noise.shape)}, which does not broadcast to {tuple(shape)}"
        )
