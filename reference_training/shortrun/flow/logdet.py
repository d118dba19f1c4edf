"""log |det dM/dz| of the flow, step by step, from Hessian-vector products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from .flow_map import NegativeEnergy, check_flow, flow

CHUNK = 256
"""Hessian-vector products at a time: of a CIFAR network of 64 channels, in float64, some GiB."""


@dataclass(frozen=True)
class Determinant:
    """What `log_abs_det` found, for B starts and K steps.

    Attributes:
        x: M(z), as the starts.
        log_abs: log |det(I + step_size H_k)|, (K, B) float64, in nats: of each step on its own.
        signs: of the same determinants, (K, B) float64: 1, -1, or 0 where a step is singular.
    """

    x: Tensor
    log_abs: Tensor
    signs: Tensor

    @property
    def total(self) -> Tensor:
        """log |det dM/dz|, (B,) float64, in nats; -inf where a step is singular."""
        return self.log_abs.sum(0)

    @property
    def flips(self) -> Tensor:
        """Steps that turn space inside out, (B,) int64: their determinant is negative.

        A gradient step of a smooth f is one-to-one as long as all eigenvalues of I + step_size H
        are positive everywhere. Where one is negative, the step folds space over, and several
        starts may end at one x. A flip proves that; without flips an even number of eigenvalues
        may still be negative.
        """
        return (self.signs < 0).sum(0)


def log_abs_det(
    f: NegativeEnergy, z: Tensor, *, steps: int, step_size: float, chunk: int = CHUNK
) -> Determinant:
    """log |det dM/dz| of the K-step map, as the sum over its steps.

    dM/dz is the product of the I + step_size H_k, H_k the Hessian of f at x_k (Nijkamp et al.
    2019, section 3.4, where M is a residual network of K layers). That product is never formed: its
    entries span more orders of magnitude than a float holds after some steps.

    States and Hessians are of the type of z, which must be the type that f computes in; for full
    accuracy give a copy of the network in float64, and z in float64. The determinants are float64
    in any case. Of a piecewise linear f (ReLU, leaky ReLU) all Hessians are 0 where they exist,
    and so is the sum: it is then not the volume that M stretches space by.

    Args:
        f: the negative energy, twice differentiable. A row's value may depend on that row alone:
            the Hessians of all rows are read from the same products.
        z: where the chains start, (B, ...).
        steps: K, 0 or more.
        step_size: the factor on the gradient, as in `flow`.
        chunk: how many Hessian-vector products are computed at a time, over all rows; a matter of
            memory and speed, not of the result.

    Returns:
        M(z) and the determinants, without a graph. Where f or its Hessian is not finite, they are
        NaN.

    Raises:
        ConfigError: a setting or a shape cannot be meant.
    """
    check_flow(z, steps=steps, step_size=step_size)
    if not isinstance(chunk, int) or chunk < 1:
        raise ConfigError(f"chunk is {chunk!r}; expected a whole number of products, at least 1")
    x = z.detach()
    size = x.shape[1:].numel()
    one = torch.eye(size, dtype=torch.float64, device=x.device)
    log_abs = x.new_zeros((steps, len(x)), dtype=torch.float64)
    signs = torch.ones_like(log_abs)
    for step in range(steps):
        jacobians = torch.add(one, hessians(f, x, chunk=chunk).double(), alpha=step_size)
        signs[step], log_abs[step] = torch.linalg.slogdet(jacobians)
        x = flow(f, x, steps=1, step_size=step_size)
    return Determinant(x, log_abs, signs)


def hessians(f: NegativeEnergy, x: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """The Hessian of f at every row of x, by products with the unit vectors.

    Args:
        f: the negative energy, twice differentiable. A row's value may depend on that row alone.
        x: images, (B, ...) with D entries each.
        chunk: products at a time, over all rows.

    Returns:
        (B, D, D) of the type of x, without a graph.
    """
    x = x.detach()
    count, size = len(x), x.shape[1:].numel()
    columns = max(1, chunk // max(1, count))
    gradient = torch.func.grad(lambda rows: f(rows).sum())
    found = x.new_empty((count, size, size))
    units = torch.eye(size, dtype=x.dtype, device=x.device)
    # Switches off the outer graph alone, which would go to the parameters.
    with torch.no_grad():
        product = torch.func.vjp(gradient, x)[1]
        parts = zip(torch.split(units, columns), torch.split(found, columns, 1), strict=True)
        for some, lines in parts:
            # The Hessian of the whole batch is block-diagonal: one unit vector in every row at
            # once reads a line of every block.
            vectors = some[:, None].expand(-1, count, -1).reshape(len(some), *x.shape)
            (products,) = torch.func.vmap(product)(vectors)
            lines.copy_(products.reshape(len(some), count, size).transpose(0, 1))
    return found
