"""A latent-variable model beside its posterior: the weights by which all of BiSM is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from .bilevel import Parameters
from .posterior import Posterior

__all__ = ["Energy", "Latent"]

Energy = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Latent:
    """The log weights log p~(v, h) - log q(h | v) of draws from a posterior.

    The gradient of a log weight in v, at the h that was drawn, is the marginal score where q is the
    exact posterior; score matching of it is BiSM's upper level (:mod:`.matching`).

    Attributes:
        energy: E(v, h), ``(B, ...)`` and ``(B, H)`` to ``(B,)``.
        posterior: q(h | v).
    """

    energy: Energy
    posterior: Posterior

    def log_weight(self, phi: Parameters, v: Tensor, noise: Tensor) -> Tensor:
        """-E(v, h) - log q(h | v) of one draw each, ``(B,)``.

        Differentiable in phi, also through the draw; in v only where v stands beside h.

        Args:
            phi: the posterior's parameters.
            v: ``(B, ...)``.
            noise: the draw's, ``(B, H)``.
        """
        h = self.posterior.draw(self._moments(phi, v.detach()), noise)
        return -self.energy(v, h) - self.posterior.log_prob(self._moments(phi, v), h)

    def negative_elbo(self, phi: Parameters, v: Tensor, noise: Tensor) -> Tensor:
        """KL(q | posterior) but for what phi cannot change, of one draw each, ``(B,)``."""
        return -self.log_weight(phi, v, noise)

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
