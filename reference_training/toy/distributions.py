"""The toy distributions: what their samplers draw, and the exact density of just that.

Shapes and constants are those of ebm-anatomy (Nijkamp et al. 2020, ``ToyDataset``): eight Gaussians
on a circle and four rings, every component 0.15 wide. As in *Energy-Based Model Training Objective
Robust to Inaccurate SGLD Samples* (section 4.1) the Gaussians have different weights; the paper
does not print them, ours grow as 1 to 8 with the angle. The 1D mixture is their counterpart.

Another setting is a ``dataclasses.replace`` of an entry of :data:`DISTRIBUTIONS`.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["DISTRIBUTIONS", "Distribution", "GaussianMixture", "Rings"]

# The rings' density has an integrable pole at the origin, with a mass of 1e-9. Nearer than this it
# is held, so that a grid with a point there can be summed.
_NEAREST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Distribution(abc.ABC):
    """A mixture with a sampler and the exact density of that sampler.

    Attributes:
        weights: positive, one per component; only their ratios matter.
        std: standard deviation in every component.
        limit: pictures and grids span [-limit, limit] on each axis.
        kde_factor: kernel width of the published density estimate over the samples' own.
        dim: 1 or 2.
    """

    weights: tuple[float, ...]
    std: float = 0.15
    limit: float
    kde_factor: float
    dim: int = 2

    @abc.abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent samples in random order: ``(n, dim)`` float32 on the generator's device."""

    @abc.abstractmethod
    def component_log_densities(self, x: Tensor) -> Tensor:
        """Log of weight times density per component, ``(..., components)`` in float64."""

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of what :meth:`sample` draws, ``(..., dim)`` to ``(...)`` in float64."""
        return self.component_log_densities(x).logsumexp(-1)

    def pictured_log_density(self, x: Tensor) -> Tensor:
        """The form that published pictures show, ``(..., dim)`` to ``(...)`` in float64."""
        return self.log_density(x)


@dataclass(frozen=True, kw_only=True)
class GaussianMixture(Distribution):
    """Isotropic Gaussians of one width around points of ``dim`` coordinates, 1 or 2."""

    centres: tuple[tuple[float, ...], ...]
    limit: float = 1.6
    kde_factor: float = 0.1

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """See :class:`Distribution`."""
        device = generator.device
        chosen = _choose(self.weights, torch.rand(n, generator=generator, device=device))
        noise = torch.randn(n, self.dim, generator=generator, device=device)
        return torch.add(_tensor(self.centres, chosen)[chosen], noise, alpha=self.std)

    def component_log_densities(self, x: Tensor) -> Tensor:
        """See :class:`Distribution`."""
        x = x.double().unsqueeze(-2)
        offsets = (x - _tensor(self.centres, x)) / self.std
        norm = self.dim * math.log(math.sqrt(2 * math.pi) * self.std)
        return _log_weights(self.weights, x) - 0.5 * offsets.square().sum(-1) - norm


@dataclass(frozen=True, kw_only=True)
class Rings(Distribution):
    """Concentric rings: a radius from N(R_k, std²), an angle that is uniform.

    The density is sum_k w_k N(r; R_k, std²) / (2 π r), with the R_k positive.
    """

    radii: tuple[float, ...]
    limit: float = 4.6
    kde_factor: float = 0.075

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """See :class:`Distribution`."""
        device = generator.device
        uniform = torch.rand(2, n, generator=generator, device=device)
        noise = torch.randn(n, generator=generator, device=device)
        chosen = _choose(self.weights, uniform[0])
        radius = torch.add(_tensor(self.radii, chosen)[chosen], noise, alpha=self.std)
        angle = uniform[1] * (2 * math.pi)
        return torch.stack((radius * angle.cos(), radius * angle.sin()), -1)

    def pictured_log_density(self, x: Tensor) -> Tensor:
        """The form of ebm-anatomy's pictures: sum_k w_k N(r; R_k, std²) / (2 π R_k).

        The inner ring of the exact density is 18% higher at one std inside it.
        """
        radius = _radius(x)
        at = _tensor(self.radii, radius)
        return (self._log_radial(radius, at) - (2 * math.pi * at).log()).logsumexp(-1)

    def component_log_densities(self, x: Tensor) -> Tensor:
        """See :class:`Distribution`."""
        radius = _radius(x).clamp_min(_NEAREST)
        at = _tensor(self.radii, radius)
        # A radius drawn below zero lands at the opposite angle, so N(-r; R_k, std²) is added.
        opposite = torch.log1p(torch.exp(-2 * radius * at / self.std**2))
        return self._log_radial(radius, at) + opposite - (2 * math.pi * radius).log()

    def _log_radial(self, radius: Tensor, at: Tensor) -> Tensor:
        norm = math.log(math.sqrt(2 * math.pi) * self.std)
        offsets = (radius - at) / self.std
        return _log_weights(self.weights, radius) - 0.5 * offsets.square() - norm


def _radius(x: Tensor) -> Tensor:
    radius: Tensor = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    return radius


def _tensor(values: tuple[object, ...], like: Tensor) -> Tensor:
    """On the device of another, and as wide if that holds floats."""
    return _kept(values, like.device, like.dtype if like.is_floating_point() else torch.float32)


@cache
def _kept(values: tuple[object, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    # What is cached under inference_mode could not be used by autograd later.
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype)


def _choose(weights: tuple[float, ...], uniform: Tensor) -> Tensor:
    total = math.fsum(weights)
    edges = tuple(math.fsum(weights[:k]) / total for k in range(1, len(weights)))
    return torch.bucketize(uniform, _tensor(edges, uniform), right=True)


def _log_weights(weights: tuple[float, ...], like: Tensor) -> Tensor:
    total = math.fsum(weights)
    return _tensor(tuple(math.log(weight / total) for weight in weights), like)


def _on_circle(components: int) -> tuple[tuple[float, float], ...]:
    angles = (2 * math.pi * k / components for k in range(components))
    return tuple((math.cos(angle), math.sin(angle)) for angle in angles)


DISTRIBUTIONS: dict[str, Distribution] = {
    "gmm": GaussianMixture(centres=_on_circle(8), weights=(1, 2, 3, 4, 5, 6, 7, 8)),
    "circles": Rings(radii=(1.0, 2.0, 3.0, 4.0), weights=(1, 1, 1, 1)),
    "mixture1d": GaussianMixture(
        centres=((-1.0,), (-1 / 3,), (1 / 3,), (1.0,)), weights=(4, 1, 3, 2), dim=1
    ),
}
