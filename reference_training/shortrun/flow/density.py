"""The map z -> x of a short run without its noise, its determinant, densities and bits.

What these numbers are, and what they are not:

- They are of the flow x = M(z), z ~ p_0 = U(-1, 1)^D, the chain without its noise, as the authors
  computed theirs. The density of the chain with noise is another, and nobody can compute it.
- p(x) = p_0(z) / |det dM/dz| is the density at M(z). Where the search for z ended at M(z) != x, it
  says nothing certain of x: a flow that contracts is dense where it arrives and empty beside.
- Outside the cube p_0 is 0, and so is the density at M(z), unless another z inside leads there.
- M need not be one-to-one. One z then gives a part of the density at M(z): a lower bound of it, and
  an upper bound of the bits.
- A density is not a probability. Pixels lie on a lattice, and a density may be as large there as it
  likes; only of images with noise that fills the lattice's cells (`dequantise`) are the bits an
  upper bound of those that a lossless code needs (Theis et al. 2016, section 3.1), and comparable
  with other papers' bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NegativeEnergy = Callable[[Tensor], Tensor]
"""f: images (B, ...) to their negative energies (B,); high on data."""
CHUNK = 256
"""Hessian-vector products at a time: of a CIFAR network of 64 channels, in float64, some GiB."""


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
    """
    differentiable = torch.is_grad_enabled() and z.requires_grad
    x = z if differentiable else z.detach()
    for _ in range(steps):
        at = x if differentiable else x.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(f(at).sum(), at, create_graph=differentiable)
        x = x + step_size * gradient
    return x


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


def log_abs_det(f: NegativeEnergy, z: Tensor, *, steps: int, step_size: float) -> Determinant:
    """log |det dM/dz| of the K-step map, as the sum over its steps.

    dM/dz is the product of the I + step_size H_k, H_k the Hessian of f at x_k (Nijkamp et al.
    2019, section 3.4, where M is a residual network of K layers). That product is never formed: its
    entries span more orders of magnitude than a float holds after some steps.

    States and Hessians are of the type of z, which must be the type that f computes in; for full
    accuracy give a copy of the network in float64, and z in float64. The determinants are float64
    in any case. Of a piecewise linear f (ReLU, leaky ReLU) all Hessians are 0 where they exist,
    and so is the sum: it is then not the volume that M stretches space by.

    Arguments are those of `flow`, f twice differentiable. Where f or its Hessian is not finite, the
    determinants are NaN. Nothing has a graph.
    """
    x = z.detach()
    size = x.shape[1:].numel()
    one = torch.eye(size, dtype=torch.float64, device=x.device)
    log_abs = x.new_zeros((steps, len(x)), dtype=torch.float64)
    signs = torch.ones_like(log_abs)
    for step in range(steps):
        jacobians = torch.add(one, hessians(f, x).double(), alpha=step_size)
        signs[step], log_abs[step] = torch.linalg.slogdet(jacobians)
        x = flow(f, x, steps=1, step_size=step_size)
    return Determinant(x, log_abs, signs)


def hessians(f: NegativeEnergy, x: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """The Hessian of f at every row of x, (B, ...) of D entries each: (B, D, D), without a graph.

    A row's value may depend on that row alone. So many lines of Hessians are computed at a time.
    """
    gradient = torch.func.grad(lambda rows: f(rows).sum())
    # The Hessian of the whole batch is block-diagonal: the derivative of a sum over the rows has a
    # line of every block.
    lines = torch.func.jacrev(
        lambda rows: gradient(rows).flatten(1).sum(0), chunk_size=max(1, chunk // max(1, len(x)))
    )
    with torch.no_grad():  # switches off the outer graph alone, which would go to the parameters
        found: Tensor = lines(x.detach())
    return found.flatten(2).transpose(0, 1)


def inside_cube(z: Tensor) -> Tensor:
    """Whether all entries of a start lie in [-1, 1]: (B, ...) -> (B,) bool."""
    return (z.abs() <= 1).flatten(1).all(1)


def extended_log_density(log_abs_det: Tensor, *, size: int) -> Tensor:
    """log p(M(z)) = log p_0(z) - log |det dM/dz|, with 2^-D for p_0 outside the cube too.

    There the density is 0 (`inside_cube`), and this is the density of nothing. In nats, (B,), for
    images in [-1, 1] of D = `size` entries; inf where a step is singular.
    """
    return -size * math.log(2) - log_abs_det


def bits_per_dim(log_density: Tensor, *, size: int, levels: int) -> Tensor:
    """A log density of images in [-1, 1] as bits per dimension of images in 0..levels.

    A pixel is levels/2 (x + 1), so that the density is divided by levels/2 for each dimension:

        bits/dim = -log2 p(x) / D + log2(levels/2)

    which of a flow from the cube is 1 + log2|det dM/dz| / D + log2(levels/2). The last term is
    6.994 for bytes (levels = 255), and 3 for the digits (levels = 16). Fewer bits are better. Those
    of the uniform density on the cube are log2(levels): 7.994 for bytes, not 8, since the cube ends
    at the outermost values, not half a level beyond. Where the density is 0 they are inf. The log
    density is in nats, of images of D = `size` entries.
    """
    return -log_density / (size * math.log(2)) + math.log2(levels / 2)


def noise_bits(noise: float, levels: int) -> float:
    """Entropy of Gaussian noise, in bits per dimension: 1/2 log2(2 pi e noise^2) + log2(levels/2).

    On images with this noise no density needs fewer bits in expectation: their entropy is at least
    that of the noise. Numbers below are of no density at these images, whatever made them. The
    noise is given as its standard deviation, in units of images in [-1, 1].
    """
    return math.log2(noise * math.sqrt(2 * math.pi * math.e) * levels / 2)


def dequantise(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Images in [-1, 1] of levels + 1 values, with uniform noise as wide as a level on each pixel.

    They lie up to 1/levels beyond [-1, 1].
    """
    noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    return x + (2 * noise - 1) / levels
