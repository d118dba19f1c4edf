"""The Gaussian-Bernoulli restricted Boltzmann machine, whose posterior is known."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..likelihood import enumerated_log_z

__all__ = ["MOST_ENUMERATED", "GaussianBernoulliRBM"]

MOST_ENUMERATED = 20


class GaussianBernoulliRBM(nn.Module):
    """E(v, h) = 1/2 sum((v - b_v)^2 / s^2) - b_h . h - v^T W h, of real v and binary h.

    Called, it is the negative free energy f(v) = log sum_h exp(-E(v, h)). The generator draws the
    weights, uniform within 1 / sqrt(visible) as in a linear layer.
    """

    def __init__(self, visible: int, hidden: int, generator: Generator) -> None:
        super().__init__()
        bound = visible**-0.5

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))

        self.weight = drawn(visible, hidden)
        self.visible_bias = drawn(visible)
        self.hidden_bias = drawn(hidden)
        self.log_std = nn.Parameter(torch.zeros(visible))

    def energy(self, v: Tensor, h: Tensor) -> Tensor:
        """E(v, h), ``(..., visible)`` and ``(..., hidden)`` to ``(...)``; h may be relaxed."""
        return self._distance(v) - (h * self.posterior_logits(v)).sum(-1)

    def forward(self, v: Tensor) -> Tensor:
        """f(v), ``(..., visible)`` to ``(...)``."""
        return F.softplus(self.posterior_logits(v)).sum(-1) - self._distance(v)

    def posterior_logits(self, v: Tensor) -> Tensor:
        """The exact p(h_j = 1 | v) as logits, ``(..., hidden)``."""
        return self.hidden_bias + v @ self.weight

    def sample_hidden(self, v: Tensor, generator: Generator) -> Tensor:
        """h of the exact posterior, ``(..., hidden)`` zeros and ones."""
        return torch.bernoulli(self.posterior_logits(v).sigmoid(), generator=generator)

    def visible_mean(self, h: Tensor) -> Tensor:
        """Mean of the Gaussian p(v | h), ``(..., visible)``; its standard deviation is s."""
        return self.visible_bias + (2 * self.log_std).exp() * (h @ self.weight.T)

    def sample_visible(self, h: Tensor, generator: Generator) -> Tensor:
        """v of p(v | h), ``(..., visible)``."""
        mean = self.visible_mean(h)
        return mean + self.log_std.exp() * torch.empty_like(mean).normal_(generator=generator)

    @torch.no_grad()
    def gibbs(self, v: Tensor, steps: int, generator: Generator) -> Tensor:
        """v after ``steps`` of block Gibbs sampling, each all of h and then all of v."""
        for _ in range(steps):
            v = self.sample_visible(self.sample_hidden(v, generator), generator)
        return v

    def log_z(self) -> Tensor:
        """log Z by the sum over all h, up to 2^20 states, the integral over v in closed form."""

        def of_states(h: Tensor) -> Tensor:
            pulled = h @ self.weight.T
            squares = (pulled.square() * (2 * self.log_std).exp()).sum(-1)
            return h @ self.hidden_bias + pulled @ self.visible_bias + squares / 2

        gaussian = self.log_std.sum() + len(self.log_std) * math.log(2 * math.pi) / 2
        return enumerated_log_z(of_states, len(self.hidden_bias), like=self.weight) + gaussian

    def _distance(self, v: Tensor) -> Tensor:
        return ((v - self.visible_bias).square() * (-2 * self.log_std).exp()).sum(-1) / 2
