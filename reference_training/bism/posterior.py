"""Posteriors q(h | v) whose draws are differentiable in their parameters.

A posterior's ``forward`` gives the moments of q(h | v), and what is done with moments has no
parameters: so both can be called with parameters that are not the module's own.
"""

from __future__ import annotations

import abc
import math
from itertools import pairwise

import torch.nn.functional as F
from torch import Generator, Tensor, nn

__all__ = ["BernoulliPosterior", "GaussianPosterior", "Posterior"]

# Uniform draws are held this far from 0 and 1, where their logit is infinite.
_SMALLEST = 1e-6


class Posterior(nn.Module, abc.ABC):
    """A module whose ``forward`` takes v to the moments of q(h | v), ``(B, M)``."""

    @abc.abstractmethod
    def noise(self, count: int, generator: Generator) -> Tensor:
        """What :meth:`draw` needs for so many v, ``(count, hidden)``."""

    @abc.abstractmethod
    def draw(self, moments: Tensor, noise: Tensor) -> Tensor:
        """h, ``(B, hidden)``, differentiable in the moments."""

    @abc.abstractmethod
    def log_prob(self, moments: Tensor, h: Tensor) -> Tensor:
        """log q(h | v), ``(B,)``."""

    @abc.abstractmethod
    def mean(self, moments: Tensor) -> Tensor:
        """Of q(h | v), ``(B, hidden)``."""


class BernoulliPosterior(nn.Linear, Posterior):
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
        """Uniform numbers."""
        like = self.bias.new_empty(count, self.out_features)
        return like.uniform_(generator=generator)

    def draw(self, moments: Tensor, noise: Tensor) -> Tensor:
        """h in (0, 1)."""
        return ((moments + noise.logit(eps=_SMALLEST)) / self.temperature).sigmoid()

    def log_prob(self, moments: Tensor, h: Tensor) -> Tensor:
        """The Bernoulli's, of h in [0, 1]; the moments are logits."""
        return -F.binary_cross_entropy_with_logits(moments, h, reduction="none").sum(-1)

    def mean(self, moments: Tensor) -> Tensor:
        """Probabilities."""
        return moments.sigmoid()


class GaussianPosterior(nn.Sequential, Posterior):
    """A diagonal Gaussian whose mean and log standard deviation three strided convolutions give.

    Args:
        shape: (C, H, W) of v; H and W are multiples of 8.
        hidden: entries of h.
        channels: of the convolutions.
    """

    def __init__(
        self, shape: tuple[int, int, int], hidden: int, channels: tuple[int, int, int]
    ) -> None:
        colours, height, width = shape
        layers: list[nn.Module] = []
        for before, after in pairwise((colours, *channels)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
        features = channels[-1] * (height // 8) * (width // 8)
        super().__init__(*layers, nn.Flatten(), nn.Linear(features, 2 * hidden))
        self.hidden = hidden

    def noise(self, count: int, generator: Generator) -> Tensor:
        """Standard normal numbers."""
        like = next(self.parameters()).new_empty(count, self.hidden)
        return like.normal_(generator=generator)

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
