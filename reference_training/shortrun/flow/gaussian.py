"""Gaussian densities of images: what a model must beat before its likelihood means anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

TOGETHER = 4096
"""Images whose products are summed together."""


@dataclass(frozen=True)
class Gaussian:
    """A normal density over D dimensions.

    Attributes:
        mean: (D,) float64.
        factor: lower triangular, (D, D) float64; the covariance is factor @ factor.T.
    """

    mean: Tensor
    factor: Tensor

    def log_density(self, x: Tensor) -> Tensor:
        """In nats, of images (B, ...) with D entries each: (B,) float64."""
        off = (x.double().flatten(1) - self.mean).T
        white = torch.linalg.solve_triangular(self.factor, off, upper=False)
        half_log_det = self.factor.diagonal().log().sum()
        norm = len(self.mean) / 2 * math.log(2 * math.pi)
        found: Tensor = -white.square().sum(0) / 2 - half_log_det - norm
        return found


def fit_gaussian(images: Tensor, *, noise: float, independent: bool) -> Gaussian:
    """The Gaussian of largest likelihood for images with noise, in expectation over the noise.

    Its covariance is that of the images plus noise^2 on the diagonal, which also keeps it from
    being singular where a pixel is the same in all images, or images are few.

    Args:
        images: (N, ...).
        noise: standard deviation of the noise, in units of the images.
        independent: pixels each on their own, without covariances.

    Raises:
        ConfigError: there are no images, or the noise is not a positive number.
    """
    if not len(images):
        raise ConfigError("there are no images to fit a Gaussian to; expected at least one")
    if not (math.isfinite(noise) and noise > 0):
        raise ConfigError(f"noise is {noise}, expected a positive standard deviation")
    size = images.shape[1:].numel()
    parts = torch.split(images.flatten(1), TOGETHER)
    mean = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(images)
    covariance = torch.zeros((size, size), dtype=torch.float64, device=images.device)
    for part in parts:
        off = part.double() - mean
        covariance += off.T @ off
    covariance /= len(images)
    if independent:
        covariance = covariance.diagonal().diag()
    covariance.diagonal().add_(noise**2)
    return Gaussian(mean, torch.linalg.cholesky(covariance))
