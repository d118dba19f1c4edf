"""From log |det dM/dz| to the density of an image and to bits per dimension.

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

import torch
from torch import Tensor

from ebmguard.errors import ConfigError


def inside_cube(z: Tensor) -> Tensor:
    """Whether all entries of a start lie in [-1, 1]: (B, ...) -> (B,) bool."""
    return (z.abs() <= 1).flatten(1).all(1)


def log_density(z: Tensor, log_abs_det: Tensor) -> Tensor:
    """log p(M(z)) = log p_0(z) - log |det dM/dz|, p_0 uniform on [-1, 1]^D.

    Args:
        z: starts, (B, ...) with D entries each.
        log_abs_det: of dM/dz, (B,), in nats.

    Returns:
        (B,) in nats, for images in [-1, 1]; -inf where z is outside the cube, whatever the
        determinant. inf where a step is singular and z inside.
    """
    found = extended_log_density(log_abs_det, size=z.shape[1:].numel())
    return torch.where(inside_cube(z), found, -math.inf)


def extended_log_density(log_abs_det: Tensor, *, size: int) -> Tensor:
    """What `log_density` would be if p_0 were 2^-D outside the cube too: no density of anything.

    Args:
        log_abs_det: of dM/dz, (B,), in nats.
        size: D, pixels times channels.

    Returns:
        (B,) in nats.
    """
    return -size * math.log(2) - log_abs_det


def bits_per_dim(log_density: Tensor, *, size: int, levels: int) -> Tensor:
    """A log density of images in [-1, 1] as bits per dimension of images in 0..levels.

    A pixel is levels/2 (x + 1), so that the density is divided by levels/2 for each dimension:

        bits/dim = -log2 p(x) / D + log2(levels/2)

    which of a flow from the cube is 1 + log2|det dM/dz| / D + log2(levels/2). The last term is
    6.994 for bytes (levels = 255), and 3 for the digits (levels = 16). Fewer bits are better.

    Args:
        log_density: in nats, of any shape.
        size: D, pixels times channels.
        levels: the largest value of a pixel.

    Returns:
        shaped as the densities; inf where the density is 0.

    Raises:
        ConfigError: `size` or `levels` is less than 1.
    """
    if size < 1:
        raise ConfigError(f"size is {size}, expected the dimensions of an image, at least 1")
    return -log_density / (size * math.log(2)) + _unit(levels)


def uniform_bits(levels: int) -> float:
    """Bits per dimension of the uniform density on the cube: log2(levels).

    7.994 for bytes, not 8: the cube ends at the outermost values, not half a level beyond.

    Raises:
        ConfigError: `levels` is less than 1.
    """
    return 1 + _unit(levels)


def noise_bits(noise: float, levels: int) -> float:
    """Entropy of Gaussian noise, in bits per dimension: 1/2 log2(2 pi e noise^2) + log2(levels/2).

    On images with this noise no density needs fewer bits in expectation: their entropy is at least
    that of the noise. Numbers below are of no density at these images, whatever made them.

    Args:
        noise: its standard deviation, in units of images in [-1, 1].
        levels: the largest value of a pixel.

    Raises:
        ConfigError: `noise` is not a positive number, or `levels` is less than 1.
    """
    if not (math.isfinite(noise) and noise > 0):
        raise ConfigError(f"noise is {noise}, expected a positive standard deviation")
    return math.log2(noise * math.sqrt(2 * math.pi * math.e)) + _unit(levels)


def dequantise(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Images with uniform noise of one level's width around every pixel.

    Args:
        x: images in [-1, 1] of levels + 1 values, (B, ...).
        levels: the largest value of a pixel.
        generator: of the noise, on the device of the images.

    Returns:
        as x; up to 1/levels beyond [-1, 1].

    Raises:
        ConfigError: `levels` is less than 1.
    """
    _unit(levels)
    noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    return x + (2 * noise - 1) / levels


def _unit(levels: int) -> float:
    if levels < 1:
        raise ConfigError(f"levels is {levels}, expected the largest value of a pixel: 255")
    return math.log2(levels / 2)
