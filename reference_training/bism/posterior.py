"""Posteriors q(h | v) whose draws are differentiable in their parameters.

A posterior's ``forward`` gives the moments of q(h | v), and what is done with moments has no
parameters: so both can be called with parameters that are not the module's own.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ebmguard.errors import ConfigError

__all__ = ["BernoulliPosterior", "GaussianPosterior", "Posterior"]

# Uniform draws are held this far from 0 and 1, where their logit is infinite.
_SMALLEST = 1e-6


class Posterior(Protocol):
    """A module whose ``forward`` takes v to the moments of q(h | v), ``(B, M)``."""

    def noise(self, count: int, generator: Generator) -> Tensor:
        """What :meth:`draw` needs for so many v, ``(count, hidden)``."""
        ...

    def draw(self, moments: Tensor, noise: Tensor) -> Tensor:
        """h, ``(B, hidden)``, differentiable in the moments."""
        ...

    def log_prob(self, moments: Tensor, h: Tensor) -> Tensor:
        """log q(h | v), ``(B,)``."""
        ...

    def mean(self, moments: Tensor) -> Tensor:
        """Of q(h | v), ``(B, hidden)``."""
        ...


class BernoulliPosterior(nn.Linear):
    """Independent bits by one linear layer; draws are relaxed (Jang et al. 2017).

    The density of a relaxed draw is the Bernoulli's own formula, which is linear in h: with the
    exact posterior of an RBM the weight -E(v, h) - log q(h | v) is the same at every h.

    Args:
        visible: entries of v, which may be an image.
        hidden: entries of h.
        temperature: of the relaxation; towards 0 the draws become bits and their gradient dies.
    """

    def __init__(self, visible: int, hidden: int, temperature: float = 0.1) -> None:
        super().__init__(visible, hidden)
        self.temperature = temperature

    def forward(self, v: Tensor) -> Tensor:
        """Logits, ``(B, ...)`` to ``(B, hidden)``."""
        return super().forward(v.flatten(1))

    def noise(self, count: int, generator: Generator) -> Tensor:
        """Uniform numbers, ``(count, hidden)``."""
        options: dict[str, Any] = {"dtype": self.bias.dtype, "device": generator.device}
        return torch.rand(count, self.out_features, generator=generator, **options)

    def draw(self, moments: Tensor, noise: Tensor) -> Tensor:
        """h in (0, 1)."""
        return ((moments + noise.logit(eps=_SMALLEST)) / self.temperature).sigmoid()

    def log_prob(self, moments: Tensor, h: Tensor) -> Tensor:
        """The Bernoulli's, of h in [0, 1]; the moments are logits."""
        return -F.binary_cross_entropy_with_logits(moments, h, reduction="none").sum(-1)

    def mean(self, moments: Tensor) -> Tensor:
        """Probabilities."""
        return moments.sigmoid()


class GaussianPosterior(nn.Sequential):
    """A diagonal Gaussian whose mean and log standard deviation three strided convolutions give.

    Args:
        shape: (C, H, W) of v; H and W are multiples of 8.
        hidden: entries of h.
        channels: of the convolutions; the published ones are 64, 128 and 256.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        hidden: int,
        channels: tuple[int, int, int] = (64, 128, 256),
    ) -> None:
        colours, height, width = shape
        if height % 8 or width % 8:
            raise ConfigError(
                f"images of {height} by {width}, expected multiples of 8 for three convolutions of "
                "stride 2; pad them"
            )
        layers: list[nn.Module] = []
        for before, after in pairwise((colours, *channels)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
        features = channels[-1] * (height // 8) * (width // 8)
        super().__init__(*layers, nn.Flatten(), nn.Linear(features, 2 * hidden))
        self.hidden = hidden

    def noise(self, count: int, generator: Generator) -> Tensor:
        """Standard normal numbers, ``(count, hidden)``."""
        options: dict[str, Any] = {
            "dtype": next(self.parameters()).dtype,
            "device": generator.device,
        }
        return torch.randn(count, self.hidden, generator=generator, **options)

    def draw(self, moments: Tensor, noise: Tensor) -> Tensor:
        """h, real."""
        mean, log_std = moments.chunk(2, dim=-1)
        return mean + log_std.exp() * noise

    def log_prob(self, moments: Tensor, h: Tensor) -> Tensor:
        """The Gaussian's; the moments are means and log standard deviations."""
        mean, log_std = moments.chunk(2, dim=-1)
        squares = ((h - mean) * (-log_std).exp()).square()
        return -(squares / 2 + log_std + math.log(2 * math.pi) / 2).sum(-1)

    def mean(self, moments: Tensor) -> Tensor:
        """The Gaussian's."""
        return moments.chunk(2, dim=-1)[0]
