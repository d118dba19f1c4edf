"""What the ranks compute; read by their processes and by the test that joins their results.

The sizes of a case are (positives, negatives) of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebmguard.energies import Variant

WORLD = 3


@dataclass(frozen=True)
class Case:
    """One call on several ranks."""

    sizes: tuple[tuple[int, int], ...]
    variant: Variant = "default"
    betas: tuple[float, ...] = (0.7,)
    ensemble: bool = False
    bad: tuple[tuple[int, str, tuple[int, ...]], ...] = ()  # (rank, side, indices) set to NaN
    offset: float = 0.0
    dtype: torch.dtype = torch.float64

    @property
    def beta_star(self) -> float | Tensor:
        return torch.tensor(self.betas, dtype=torch.float64) if self.ensemble else self.betas[0]

    def energies(self) -> list[tuple[Tensor, Tensor]]:
        """Per rank, positives and negatives that differ in level from rank to rank."""
        rng = torch.Generator().manual_seed(len(self.sizes))
        models = (len(self.betas),) if self.ensemble else ()
        ranks = []
        for rank, size in enumerate(self.sizes):
            f = [torch.randn(*models, n, generator=rng, dtype=torch.float64) * 2 for n in size]
            for broken, side, where in self.bad:
                if broken == rank:
                    f[side == "neg"][..., list(where)] = torch.nan
            level = self.offset + rank
            ranks.append(((f[0] + level).to(self.dtype), (f[1] + level).to(self.dtype)))
        return ranks


EQUAL = ((4, 3), (4, 3))
UNEQUAL = ((4, 1), (6, 5))
THREE = ((2, 3), (6, 1), (4, 4))
VARIANTS: tuple[Variant, ...] = ("default", "no_pos", "batch", "true")

CASES: dict[str, Case] = {}
for _variant in VARIANTS:
    for _name, _sizes in (("equal", EQUAL), ("unequal", UNEQUAL), ("three", THREE)):
        CASES[f"{_variant}, {_name}"] = Case(_sizes, _variant)
    CASES[f"{_variant}, negative exponent"] = Case(THREE, _variant, (-0.7,))
    CASES[f"{_variant}, ensemble with a zero"] = Case(UNEQUAL, _variant, (0.5, 0.0, -1.0), True)
    CASES[f"{_variant}, NaN on one rank"] = Case(
        UNEQUAL, _variant, bad=((1, "pos", (0, 5)), (1, "neg", (2,)))
    )
    CASES[f"{_variant}, a rank without usable negatives"] = Case(
        EQUAL, _variant, bad=((0, "neg", (0, 1, 2)),)
    )
    CASES[f"{_variant}, the same far from zero in float32"] = Case(
        EQUAL, _variant, bad=((0, "neg", (0, 1, 2)),), offset=-1e5, dtype=torch.float32
    )
    CASES[f"{_variant}, no usable negative anywhere"] = Case(
        EQUAL, _variant, bad=((0, "neg", (0, 1, 2)), (1, "neg", (0, 1, 2)))
    )
    if _variant != "true":
        CASES[f"{_variant}, a rank without usable positives"] = Case(
            EQUAL, _variant, bad=((1, "pos", (0, 1, 2, 3)),)
        )
        CASES[f"{_variant}, odd sizes"] = Case(((1, 2), (3, 3), (5, 1)), _variant)
