"""Exactly normalised densities as bases, and log Z by summation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ebmguard.errors import ConfigError
from ebmguard.samplers.sgld import Energy

__all__ = ["Bernoulli", "Density", "Gaussian", "enumerated_log_z", "quadrature_log_z"]

_MOST_BITS = 20
_SAMPLES, _STATES = 4096, 2**14  # that are held at once


class Density(Protocol):
    """The methods of a base, which may be a flow."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised log q of samples ``(B, ...)``: ``(B,)``, in nats; differentiable."""

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent samples ``(count, ...)``, detached, in the dtype of f's input."""


@dataclass(frozen=True)
class Gaussian:
    """A normal density over D entries of any shape.

    Attributes:
        mean: in the shape of one sample, float64.
        factor: float64; lower triangular ``(D, D)``, of covariance factor @ factor.T; or standard
            deviations ``(D,)`` of independent entries.
        dtype: the dtype of its samples.
    """

    mean: Tensor
    factor: Tensor
    dtype: torch.dtype = torch.float32

    @classmethod
    def fit(cls, x: Tensor, *, noise: float, independent: bool) -> Gaussian:
        """Fit mean and covariance to samples; noise² on the diagonal keeps it from being singular.

        Args:
            x: samples, ``(N, ...)``; ConfigError if there are none.
            noise: standard deviation of the noise, in units of the samples, else a ConfigError.
            independent: ignore the covariances of the entries.
        """
        if not len(x):
            raise ConfigError("there are no samples to fit a Gaussian to; expected at least one")
        if not 0 < noise < math.inf:
            raise ConfigError(f"noise is {noise}, expected a positive standard deviation")
        rows = x.detach().flatten(1)
        mean = rows.mean(0, dtype=torch.float64)
        spread = torch.full_like(mean, noise**2)
        spread = spread if independent else spread.diag()
        for part in torch.split(rows, _SAMPLES):
            off = part.double() - mean
            spread += (off.square().sum(0) if independent else off.T @ off) / len(x)
        factor = spread.sqrt() if independent else torch.linalg.cholesky(spread)
        return cls(mean.reshape(x.shape[1:]), factor, x.dtype)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density in nats of samples ``(B, ...)``: ``(B,)`` float64."""
        white, scales = (x.double() - self.mean).flatten(1), self.factor
        if scales.ndim == 1:
            white = white / scales
        else:
            white = torch.linalg.solve_triangular(scales, white.T, upper=False).T
            scales = scales.diagonal()
        norm = scales.log().sum() + len(scales) / 2 * math.log(2 * math.pi)
        return -white.square().sum(1) / 2 - norm

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """``(count, ...)``."""
        z = self.factor.new_empty(count, len(self.factor)).normal_(generator=generator)
        off = z * self.factor if self.factor.ndim == 1 else z @ self.factor.T
        return (self.mean + off.reshape(-1, *self.mean.shape)).to(self.dtype)


@dataclass(frozen=True)
class Bernoulli:
    """Independent bits, each 0 or 1, as floating-point numbers.

    Attributes:
        logits: log p / (1 - p) of a 1, in the shape of one sample; samples have their dtype.
    """

    logits: Tensor

    @classmethod
    def fit(cls, x: Tensor) -> Bernoulli:
        """Fit the means of bits ``(N, ...)``, plus a 0 and a 1 for each; else a ConfigError."""
        if not len(x) or not ((x == 0) | (x == 1)).all():
            raise ConfigError("x holds no bits to fit a Bernoulli to; expected samples of 0 and 1")
        return cls(torch.logit((x.detach().sum(0) + 1) / (len(x) + 2)))

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-probability in nats of bits ``(B, ...)``: ``(B,)``."""
        return (x * self.logits - functional.softplus(self.logits)).flatten(1).sum(1)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples ``(count, ...)``."""
        p = self.logits.sigmoid().expand(count, *self.logits.shape)
        return torch.bernoulli(p, generator=generator)


def enumerated_log_z(f: Energy, bits: int, *, like: Tensor | None = None) -> Tensor:
    """log Σ exp f(h) over all h in {0, 1}^bits: ``(...)`` float64.

    Args:
        f: negative energy, ``(M, bits)`` to ``(M, ...)``: a number for each state, or several.
        bits: number of bits of a state, 1 to 20, else a ConfigError.
        like: a tensor with the dtype and device of the states; None is float64 on the CPU.
    """
    if not 1 <= bits <= _MOST_BITS:
        raise ConfigError(f"bits is {bits}, expected 1 to {_MOST_BITS}: 2**bits states are summed")
    like = torch.empty((), dtype=torch.float64, device="cpu") if like is None else like
    place = torch.arange(bits, device=like.device)
    states = torch.arange(2**bits, device=like.device)[:, None]
    return _log_sum(f, states, lambda part: ((part >> place) & 1).to(like))


def quadrature_log_z(
    f: Energy,
    low: Sequence[float],
    high: Sequence[float],
    *,
    points: int = 400,
    like: Tensor | None = None,
) -> Tensor:
    """log ∫ exp f(x) dx over a box in one or two dimensions, by the midpoint rule: 0-dim float64.

    Args:
        f: negative energy, ``(M, dim)`` to ``(M,)``.
        low, high: the box's corners, one or two numbers each, else a ConfigError.
        points: cells per side, else a ConfigError. For a smooth f the error falls as 1/points².
        like: as in :func:`enumerated_log_z`.
    """
    sides = [b - a for a, b in zip(low, high, strict=False)]
    if not len(low) == len(high) == len(sides) in (1, 2) or min(*sides, points) <= 0:
        raise ConfigError(
            f"low={low}, high={high}, points={points}; expected one or two numbers each, every one "
            "of high above that of low, and at least one cell a side"
        )
    like = torch.empty((), dtype=torch.float64, device="cpu") if like is None else like
    middle = (torch.arange(points, dtype=torch.float64, device=like.device) + 0.5) / points
    axes = [a + side * middle for a, side in zip(low, sides, strict=True)]
    grid = torch.cartesian_prod(*axes).reshape(-1, len(axes))
    cells = torch.tensor(sides, dtype=torch.float64, device=like.device) / points
    return _log_sum(f, grid, lambda part: part.to(like)) + cells.log().sum()


@torch.no_grad()
def _log_sum(f: Energy, states: Tensor, seen: Callable[[Tensor], Tensor]) -> Tensor:
    sums = [f(seen(part)).double().logsumexp(0) for part in torch.split(states, _STATES)]
    return torch.stack(sums).logsumexp(0)
