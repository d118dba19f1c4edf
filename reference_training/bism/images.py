"""What an RBM is trained on: points in the plane, or images as rows of numbers."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from ..data import ImageData, kept_data
from ..toy.distributions import DISTRIBUTIONS, Distribution

__all__ = ["IMAGES", "Checkerboard", "FlatImages", "open_data"]

IMAGES = {"digits": -1.0, "frey": 0.0}
"""Data sets by name, and the number that black is; white is 1. The digits' is that of the other
trainers, the faces' that of the published noise and learning rate."""


class Checkerboard:
    """Two squares of four in the unit square, as published: uniform on those of one colour."""

    dim = 2

    def sample(self, n: int, generator: Generator) -> Tensor:
        """Independent samples, ``(n, 2)`` float32."""
        device = generator.device
        corner = torch.randint(2, (n, 1), generator=generator, device=device)
        return (corner + torch.rand(n, 2, generator=generator, device=device)) / 2

    def log_density(self, x: Tensor) -> Tensor:
        """log 2 on the two squares, ``(..., 2)`` to ``(...)`` in float64."""
        column, row = (2 * x.double()).floor().unbind(-1)
        inside = (column == row) & (column >= 0) & (column < 2)
        return torch.full_like(column, math.log(2)).masked_fill(~inside, -math.inf)


class FlatImages:
    """Images of `dim` entries with uniform noise as wide as a grey level: they have a density."""

    def __init__(self, data: ImageData, black: float) -> None:
        self._data, self._black, self.dim = data, black, data.train_x[0].numel()

    def sample(self, n: int, generator: Generator) -> Tensor:
        """Training images drawn with replacement, ``(n, dim)`` float32."""
        images = self._data.train_x
        rows = torch.randint(len(images), (n,), generator=generator, device=images.device)
        return self._flat(images[rows], generator)

    def held_out(self, n: int, generator: Generator) -> Tensor:
        """The test images, the first ``n`` of them at most: ``(N, dim)`` float32."""
        return self._flat(self._data.test_x[:n], generator)

    def _flat(self, x: Tensor, generator: Generator) -> Tensor:
        level = torch.rand(x.shape, generator=generator, device=x.device) - 0.5
        white = (self._data.scale(x + level) + 1) / 2
        return (self._black + (1 - self._black) * white).flatten(1)


def open_data(
    name: str, root: str | None, device: torch.device | None = None
) -> Checkerboard | Distribution | FlatImages:
    """The data of a name; images are on a device."""
    if name not in IMAGES:
        return Checkerboard() if name == "checkerboard" else DISTRIBUTIONS[name]
    images = kept_data(name, root, valid_images=0).to(device or torch.device("cpu"))
    return FlatImages(images, IMAGES[name])
