"""Many small MLPs as one: every layer is one batched matrix product over the members."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (32, 64, 64, 64, 1)
NEGATIVE_SLOPE = 0.05


class EnsembleMLP(nn.Module):
    """The toy network of Nijkamp et al. (2020), dim-32-64-64-64-1 with LeakyReLU 0.05, G times.

    Theirs is written as 1x1 convolutions on (B, 2, 1, 1) and initialised as PyTorch does by
    default, uniformly within ±1/sqrt(fan_in); so is this one. The last layer has no bias: a
    constant in f changes nothing, its gradient is exactly zero in every variant of the objective,
    and Adam would turn the rounding errors of that zero into a random walk.
    Members of equal seed start out equal.
    """

    def __init__(self, seeds: Sequence[int], dim: int = 2) -> None:
        super().__init__()
        sizes = (dim, *WIDTHS)
        generators = {seed: torch.Generator().manual_seed(seed) for seed in seeds}
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for fan_in, fan_out in itertools.pairwise(sizes):
            bound = 1 / math.sqrt(fan_in)
            for kind, shape in ((self.weights, (fan_in, fan_out)), (self.biases, (1, fan_out))):
                drawn = {
                    seed: torch.empty(shape).uniform_(-bound, bound, generator=generator)
                    for seed, generator in generators.items()
                }
                if kind is self.weights or fan_out > 1:
                    kind.append(torch.stack([drawn[seed] for seed in seeds]))

    @property
    def members(self) -> int:
        """G, how many networks these are."""
        return len(self.weights[0])

    def forward(self, x: Tensor) -> Tensor:
        """Negative energies f: (G, n, dim) -> (G, n)."""
        for weight, bias in zip(self.weights, self.biases, strict=False):
            x = F.leaky_relu(torch.baddbmm(bias, x, weight), NEGATIVE_SLOPE, inplace=True)
        # A matrix product with one column rounds differently for one member than for many.
        f: Tensor = (x * self.weights[-1].transpose(1, 2)).sum(-1)
        return f
