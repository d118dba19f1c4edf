"""The map z -> x of a short run without its noise: K steps of gradient ascent on f."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    """
    differentiable = torch.is_grad_enabled() and z.requires_grad
    x = z if differentiable else z.detach()
    for _ in range(steps):
        at = x if differentiable else x.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(f(at).sum(), at, create_graph=differentiable)
        x = x + step_size * gradient
    return x
