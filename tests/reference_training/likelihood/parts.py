"""Models whose normalising constants are known, with exact samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ebmguard.reference_training.likelihood import (
    Bernoulli,
    Gaussian,
    Path,
    enumerated_log_z,
    quadrature_log_z,
)
from tests.reference_training.parts import rng

WIDE = torch.float64


# Seeds from 100 on: the walks of the tests must not get the noise of their starts once more.


def normal(count: int, *shape: int, seed: int) -> Tensor:
    return torch.randn((count, *shape), generator=rng(seed), dtype=WIDE)


def isotropic(dim: int, std: float) -> Gaussian:
    return Gaussian(torch.zeros(dim, dtype=WIDE), torch.full((dim,), std, dtype=WIDE), WIDE)


@dataclass(frozen=True)
class Known:
    """A path, log Z of its model by another way, exact samples, and how many temperatures do."""

    path: Path
    log_z: float
    samples: Callable[[int], Tensor]
    temperatures: int


def gaussian(leapfrog_steps: int = 1) -> Known:
    """exp(f) = 3 exp(-½ (x - m)ᵀ P (x - m)) in three dimensions: the closed form."""
    mean = torch.tensor([0.5, -1.0, 0.3], dtype=WIDE)
    factor = torch.tensor([[0.6, 0.0, 0.0], [0.3, 0.5, 0.0], [-0.2, 0.1, 0.8]], dtype=WIDE)
    inverse = torch.linalg.inv(factor)

    def f(x: Tensor) -> Tensor:
        white: Tensor = (x - mean) @ inverse.T
        return math.log(3) - white.square().sum(1) / 2

    log_z = math.log(3) + 1.5 * math.log(2 * math.pi) + float(factor.diagonal().log().sum())
    path = Path(f, isotropic(3, 1.5), leapfrog_steps=leapfrog_steps)
    return Known(
        path, log_z, lambda n: mean + normal(n, 3, seed=101) @ factor.T, 40 * leapfrog_steps
    )


def modes() -> Known:
    """Two Gaussians of unlike weight and width in two dimensions: quadrature."""
    centres = torch.tensor([[-1.5, 0.0], [1.5, 1.0]], dtype=WIDE)
    stds = torch.tensor([0.6, 0.3], dtype=WIDE)
    shares = torch.tensor([0.5, 0.5], dtype=WIDE)

    def f(x: Tensor) -> Tensor:
        squares = ((x[:, None] - centres) / stds[:, None]).square().sum(-1)
        return (shares.log() - 2 * stds.log() - squares / 2).logsumexp(1)

    def samples(n: int) -> Tensor:
        mode = torch.multinomial(shares, n, replacement=True, generator=rng(102))
        return centres[mode] + stds[mode, None] * normal(n, 2, seed=103)

    log_z = float(quadrature_log_z(f, (-6.0, -6.0), (6.0, 6.0)))
    return Known(Path(f, isotropic(2, 2.0)), log_z, samples, 150)


def bernoulli_rbm() -> Known:
    """A joint state of 6 visible and 4 hidden bits, by block Gibbs at each temperature."""
    w = 1.2 * normal(6, 4, seed=107)
    bias = normal(10, seed=108)
    base = Bernoulli(0.5 * normal(10, seed=109))

    def f(x: Tensor) -> Tensor:
        return x @ bias + ((x[:, :6] @ w) * x[:, 6:]).sum(1)

    def gibbs(x: Tensor, beta: float, generator: Generator | None) -> Tensor:
        logits = (1 - beta) * base.logits + beta * bias
        h = torch.bernoulli((logits[6:] + beta * x[:, :6] @ w).sigmoid(), generator=generator)
        v = torch.bernoulli((logits[:6] + beta * h @ w.T).sigmoid(), generator=generator)
        return torch.cat((v, h), 1)

    def samples(n: int) -> Tensor:
        states = ((torch.arange(1024)[:, None] >> torch.arange(10)) & 1).to(WIDE)
        share = f(states).softmax(0)
        return states[torch.multinomial(share, n, replacement=True, generator=rng(110))]

    path = Path(f, base, transition=gibbs)
    return Known(path, float(enumerated_log_z(f, 10)), samples, 40)
