"""The map z -> x of a short run without its noise: K steps of gradient ascent on f."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

NegativeEnergy = Callable[[Tensor], Tensor]
"""f: images (B, ...) to their negative energies (B,); high on data."""


def flow(f: NegativeEnergy, z: Tensor, *, steps: int, step_size: float) -> Tensor:
    """M(z): `steps` times x <- x + step_size * grad f(x), from x = z.

    The flow of a short run in Nijkamp et al. (2019), section 3.4: what its chains do once their
    noise is negligible beside the gradient. Each row of z goes its own way. The result can be
    differentiated in z, through all steps, where z requires its gradient and gradients are
    enabled; elsewhere no graph is kept, and memory is that of one step.

    Args:
        f: the negative energy. A row's value may depend on that row alone.
        z: where the chains start, (B, ...).
        steps: K, 0 or more.
        step_size: the factor on the gradient, with (1 - beta) in it where the chains' drift has it.

    Returns:
        x, shaped as z, of its type and on its device.

    Raises:
        ConfigError: the number of steps, the step size or the shapes cannot be meant.
    """
    check_flow(z, steps=steps, step_size=step_size)
    differentiable = torch.is_grad_enabled() and z.requires_grad
    x = z if differentiable else z.detach()
    for _ in range(steps):
        x = x + step_size * _gradient(f, x, differentiable)
    return x


def check_flow(z: Tensor, *, steps: int, step_size: float) -> None:
    """Refuse what no flow can be run with.

    Raises:
        ConfigError: the number of steps, the step size or the starts cannot be meant.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise ConfigError(
            f"steps is {steps!r}; expected a whole number, 0 or more: the K of training"
        )
    if not math.isfinite(step_size):
        raise ConfigError(f"step_size is {step_size!r}; expected a finite number")
    if z.ndim < 2 or not z.is_floating_point():
        raise ConfigError(
            f"the flow's starts are {tuple(z.shape)} of {z.dtype}; expected (B, ...) of floats: a "
            "single image needs its batch dimension, and bytes their scale"
        )


def _gradient(f: NegativeEnergy, x: Tensor, differentiable: bool) -> Tensor:
    if not differentiable:
        x = x.detach().requires_grad_()
    with torch.enable_grad():
        values = f(x)
        if values.shape != x.shape[:1]:
            raise ConfigError(
                f"f gave {tuple(values.shape)} for {tuple(x.shape)}; expected one number for each "
                f"row, {tuple(x.shape[:1])}"
            )
        (gradient,) = torch.autograd.grad(values.sum(), x, create_graph=differentiable)
    return gradient
