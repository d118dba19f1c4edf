"""Posteriors q(h | v), and the weights of their draws, by which all of BiSM is written.

A posterior's ``forward`` gives the moments of q(h | v), ``(B, M)``, and what is done with moments
has no parameters: so both can be called with parameters that are not the module's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call

from .bilevel import Parameters

__all__ = ["BernoulliPosterior", "Energy", "GaussianPosterior", "Latent", "Posterior"]

Energy = Callable[[Tensor, Tensor], Tensor]
"""E(v, h), ``(B, ...)`` and ``(B, H)`` to ``(B,)``."""

# Uniform draws are held this far from 0 and 1, where their logit is infinite.
_SMALLEST = 1e-6


class BernoulliPosterior(nn.Linear):
    """Independent bits by one linear layer; draws are relaxed (Jang et al. 2017).

    The density of a relaxed draw is the Bernoulli's own formula, which is linear in h: with the
    exact posterior of an RBM the weight -E(v, h) - log q(h | v) is the same at every h.

    Towards a temperature of 0 the draws become bits and their gradient dies.
    """

    def __init__(self, visible: int, hidden: int, temperature: float = 0.1) -> None:
        super().__init__(visible, hidden)
        self.temperature = temperature

    def forward(self, v: Tensor) -> Tensor:
        """Logits, ``(B, ...)`` to ``(B, hidden)``."""
        return super().forward(v.flatten(1))

    def noise(self, count: int, generator: Generator) -> Tensor:
        """Uniform numbers, what :meth:`draw` needs for so many v, ``(count, hidden)``."""
        return self.bias.new_empty(count, self.out_features).uniform_(generator=generator)

    def draw(self, moments: Tensor, noise: Tensor) -> Tensor:
        """h in (0, 1), ``(B, hidden)``, differentiable in the moments."""
        return ((moments + noise.logit(eps=_SMALLEST)) / self.temperature).sigmoid()

    def log_prob(self, moments: Tensor, h: Tensor) -> Tensor:
        """log q(h | v), ``(B,)``: the Bernoulli's, of h in [0, 1]; the moments are logits."""
        return -F.binary_cross_entropy_with_logits(moments, h, reduction="none").sum(-1)

    def mean(self, moments: Tensor) -> Tensor:
        """Of q(h | v), ``(B, hidden)``."""
        return moments.sigmoid()


class GaussianPosterior(nn.Sequential):
    """A diagonal Gaussian whose mean and log standard deviation three strided convolutions give.

    v has the shape (C, H, W), and H and W are multiples of 8.
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
        like = next(self.parameters())
        return like.new_empty(count, self.hidden).normal_(generator=generator)

    def draw(self, moments: Tensor, noise: Tensor) -> Tensor:
        """h, real, ``(B, hidden)``, differentiable in the moments."""
        mean, log_std = moments.chunk(2, dim=-1)
        return mean + log_std.exp() * noise

    def log_prob(self, moments: Tensor, h: Tensor) -> Tensor:
        """log q(h | v), ``(B,)``; the moments are means and log standard deviations."""
        mean, log_std = moments.chunk(2, dim=-1)
        squares = ((h - mean) * (-log_std).exp()).square()
        return -(squares / 2 + log_std + math.log(2 * math.pi) / 2).sum(-1)

    def mean(self, moments: Tensor) -> Tensor:
        """Of q(h | v), ``(B, hidden)``."""
        return moments.chunk(2, dim=-1)[0]


Posterior = BernoulliPosterior | GaussianPosterior


@dataclass(frozen=True)
class Latent:
    """The log weights log p~(v, h) - log q(h | v) of draws from a posterior.

    The gradient of a log weight in v, at the h that was drawn, is the marginal score where q is the
    exact posterior; score matching of it is BiSM's upper level (:mod:`.matching`). Minus their mean
    is KL(q | posterior) but for what phi cannot change.
    """

    energy: Energy
    posterior: Posterior

    def log_weight(self, phi: Parameters, v: Tensor, noise: Tensor) -> Tensor:
        """-E(v, h) - log q(h | v) of one draw each, ``(B,)``, q with the parameters phi.

        Differentiable in phi, also through the draw; in v only where v stands beside h.
        """
        h = self.posterior.draw(self._moments(phi, v.detach()), noise)
        return -self.energy(v, h) - self.posterior.log_prob(self._moments(phi, v), h)

    def conditional_fisher(self, phi: Parameters, v: Tensor, noise: Tensor) -> Tensor:
        """1/2 |grad_h log weight|^2, the Fisher divergence of q to the posterior, ``(B,)``.

        Of real h: on bits the gradient of a relaxation says nothing about the posterior.
        """
        moments = self._moments(phi, v)
        h = self.posterior.draw(moments, noise)
        log_weight = -self.energy(v, h) - self.posterior.log_prob(moments, h)
        (slope,) = torch.autograd.grad(log_weight.sum(), h, create_graph=True)
        return slope.square().sum(-1) / 2

    def _moments(self, phi: Parameters, v: Tensor) -> Tensor:
        found: Tensor = functional_call(self.posterior, phi, (v,))
        return found
