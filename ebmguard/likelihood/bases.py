"""Densities that annealing may begin from: normalised, and easy to draw from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigError

__all__ = ["Bernoulli", "Density", "Gaussian"]

_TOGETHER = 4096  # samples that are widened together


class Density(Protocol):
    """What a base must have. A flow, or any other density, needs no more than these two."""

    def log_prob(self, x: Tensor) -> Tensor:
        """log q of samples ``(B, ...)``, normalised: ``(B,)``, in nats. MALA and HMC derive it."""
        ...

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent samples ``(count, ...)``, detached, in the dtype that f takes."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """A normal density over D entries of any shape.

    Attributes:
        mean: in the shape of one sample, float64.
        factor: float64; lower triangular ``(D, D)``, the covariance is factor @ factor.T; or the
            standard deviations ``(D,)`` of independent entries.
        dtype: of its samples.
    """

    mean: Tensor
    factor: Tensor
    dtype: torch.dtype = torch.float32

    @classmethod
    def fit(cls, x: Tensor, *, noise: float, independent: bool) -> Gaussian:
        """The Gaussian of largest likelihood for samples with noise, in expectation over it.

        Its covariance is that of the samples plus noise² on the diagonal, and never singular.

        Args:
            x: samples, ``(N, ...)``; ConfigError of none.
            noise: its standard deviation, in units of the samples, or ConfigError.
            independent: entries each on their own, without covariances.
        """
        if not len(x):
            raise ConfigError("there are no samples to fit a Gaussian to; expected at least one")
        if not (math.isfinite(noise) and noise > 0):
            raise ConfigError(f"noise is {noise}, expected a positive standard deviation")
        rows = x.detach().flatten(1)
        mean = rows.mean(0, dtype=torch.float64)
        spread = torch.full_like(mean, noise**2)
        spread = spread if independent else spread.diag()
        for part in torch.split(rows, _TOGETHER):
            off = part.double() - mean
            spread += (off.square().sum(0) if independent else off.T @ off) / len(x)
        factor = spread.sqrt() if independent else torch.linalg.cholesky(spread)
        return cls(mean.reshape(x.shape[1:]), factor, x.dtype)

    def log_prob(self, x: Tensor) -> Tensor:
        """In nats, of samples ``(B, ...)``: ``(B,)`` float64."""
        off = (x.double() - self.mean).flatten(1)
        if self.factor.ndim == 1:
            white, scales = off / self.factor, self.factor
        else:
            white = torch.linalg.solve_triangular(self.factor, off.T, upper=False).T
            scales = self.factor.diagonal()
        norm = scales.log().sum() + len(scales) / 2 * math.log(2 * math.pi)
        found: Tensor = -white.square().sum(1) / 2 - norm
        return found

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
        """The means of bits ``(N, ...)``, as if one more 0 and one more 1 had been seen of each.

        ConfigError of no samples, or of others.
        """
        if not len(x) or not ((x == 0) | (x == 1)).all():
            raise ConfigError("x holds no bits to fit a Bernoulli to; expected samples of 0 and 1")
        return cls(torch.logit((x.detach().sum(0) + 1) / (len(x) + 2)))

    def log_prob(self, x: Tensor) -> Tensor:
        """In nats, of bits ``(B, ...)``: ``(B,)``."""
        each = x * self.logits - functional.softplus(self.logits)
        return each.flatten(1).sum(1)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """``(count, ...)``."""
        p = self.logits.sigmoid().expand(count, *self.logits.shape)
        return torch.bernoulli(p, generator=generator)
