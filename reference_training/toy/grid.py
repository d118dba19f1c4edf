"""The grid on which densities are pictured and integrated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .distributions import Distribution

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid:
    """A regular grid in one or two dimensions, the same axis on each.

    Attributes:
        axis: ``(n,)`` float64, equally spaced.
        dim: 1 or 2.
    """

    axis: Tensor
    dim: int

    @staticmethod
    def of(distribution: Distribution, resolution: int = 200) -> Grid:
        """The published grid of a distribution: ``linspace(-limit, limit, resolution)``."""
        return Grid.wide(distribution.limit, resolution, distribution.dim)

    @staticmethod
    def wide(limit: float, points: int, dim: int) -> Grid:
        """From -limit to limit."""
        return Grid(torch.linspace(-limit, limit, points, dtype=torch.float64), dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(n,)`` or ``(n, n)``: what a function's values on :attr:`points` are reshaped to."""
        return (len(self.axis),) * self.dim

    @property
    def cell(self) -> float:
        """Length or area that one point stands for."""
        return float(self.axis[1] - self.axis[0]) ** self.dim

    @cached_property
    def points(self) -> Tensor:
        """``(n**dim, dim)`` float64, row by row: the values of y are slow, columns are (x, y)."""
        if self.dim == 1:
            return self.axis.unsqueeze(-1)
        y, x = torch.meshgrid(self.axis, self.axis, indexing="ij")
        return torch.stack((x.flatten(), y.flatten()), -1)
