"""Energies whose densities are known, and random numbers of a seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PRECISION = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)


def bowl(x: Tensor) -> Tensor:
    """log-density of N(0, PRECISION⁻¹), up to a constant."""
    return -0.5 * torch.einsum("...i,ij,...j->...", x, PRECISION, x)


def wells(x: Tensor) -> Tensor:
    """Two wells at ±1 in each direction, with a slope between them."""
    return (-(x.square() - 1).square() + 0.3 * x).sum(-1)


class Gaussian(nn.Module):
    """:func:`bowl` as a module, for a guard to find."""

    def __init__(self) -> None:
        super().__init__()
        self.precision = nn.Parameter(PRECISION.clone())

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = -0.5 * torch.einsum("...i,ij,...j->...", x, self.precision, x)
        return f


def scale_of(step_size: float, noise_std: float) -> float:
    return 2 * step_size / noise_std**2


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
