"""The checkerboard of the published experiments: two squares of four, in the unit square."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

__all__ = ["Checkerboard"]


class Checkerboard:
    """Uniform on the squares of one colour."""

    @property
    def dim(self) -> int:
        """2."""
        return 2

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
