"""What the ranks compute; read by their processes and by the test that joins their results.

The sizes of a case are (positives, negatives) of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebmguard.energies import Groups, LogQ, Variant

WORLD = 4


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
    labels: tuple[tuple[list[int], list[int]], ...] = ()  # of each rank's positives and negatives
    scales: tuple[float, ...] = ()  # the output scale of each class
    proposal: float | None = None  # log q has this offset

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
                if broken == rank and side in ("pos", "neg"):
                    f[side == "neg"][..., list(where)] = torch.nan
            level = self.offset + rank
            ranks.append(((f[0] + level).to(self.dtype), (f[1] + level).to(self.dtype)))
        return ranks

    def groups(self) -> list[Groups] | list[None]:
        """Class labels, and the positives' output scales, rank by rank."""
        if not self.labels:
            return [None] * len(self.sizes)
        found: list[Groups] = []
        for y_pos, y_neg in (map(torch.tensor, labels) for labels in self.labels):
            scale = torch.tensor(self.scales, dtype=self.dtype)
            found.append((y_pos, y_neg, scale[y_pos]) if self.scales else (y_pos, y_neg))
        return found

    def log_q(self) -> list[LogQ] | list[None]:
        """Log-densities of the proposal, rank by rank, spoiled where ``bad`` says log_q."""
        if self.proposal is None:
            return [None] * len(self.sizes)
        rng = torch.Generator().manual_seed(7)
        models = (len(self.betas),) if self.ensemble else ()
        found = []
        for rank, (n, m) in enumerate(self.sizes):
            pos, neg = (torch.randn(*models, k, generator=rng, dtype=torch.float64) for k in (n, m))
            for broken, side, where in self.bad:
                if broken == rank and side == "log_q_neg":
                    neg[..., list(where)] = -torch.inf
            # Each rank draws from a proposal of its own.
            level = self.proposal - 2.0 * rank
            found.append(((pos + level).to(self.dtype), (neg + level).to(self.dtype)))
        return found


EQUAL = ((4, 3), (4, 3))
UNEQUAL = ((4, 1), (6, 5))
THREE = ((2, 3), (6, 1), (4, 4))
FOUR = ((2, 1), (4, 2), (2, 3), (2, 1))
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
    CASES[f"{_variant}, proposal"] = Case(UNEQUAL, _variant, proposal=-3.0)
    CASES[f"{_variant}, four and a proposal"] = Case(FOUR, _variant, (-0.7,), proposal=1.0)
    CASES[f"{_variant}, ensemble and a proposal"] = Case(
        UNEQUAL, _variant, (0.5, 0.0, -1.0), True, proposal=0.5
    )
    CASES[f"{_variant}, a rank whose log q is lost"] = Case(
        EQUAL, _variant, bad=((0, "log_q_neg", (0, 1, 2)),), proposal=0.0
    )
    CASES[f"{_variant}, proposal far from zero in float32"] = Case(
        EQUAL, _variant, offset=-1e5, dtype=torch.float32, proposal=-1e5
    )
    if _variant in ("default", "no_pos"):
        # Class 2 has negatives on the other rank only, class 3 is nobody else's, 5 has none at all.
        CASES[f"{_variant}, classes"] = Case(
            UNEQUAL, _variant, labels=(([0, 2, 3, 5], [3]), ([0, 1, 0, 1, 2, 5], [0, 1, 2, 0, 2]))
        )
        CASES[f"{_variant}, classes of an ensemble and a proposal"] = Case(
            UNEQUAL,
            _variant,
            (0.5, 0.0, -1.0),
            True,
            labels=(([0, 2, 3, 5], [3]), ([0, 1, 0, 1, 2, 5], [0, 1, 2, 0, 2])),
            proposal=2.0,
        )
        CASES[f"{_variant}, levels of an ensemble and a proposal"] = Case(
            UNEQUAL,
            _variant,
            (0.5, 0.0, -1.0),
            True,
            labels=(([0, 2, 3, 5], [3]), ([0, 1, 0, 1, 2, 5], [0, 1, 2, 0, 2])),
            scales=(0.25, 1.0, 3.0, 2.0, 1.0, 0.5),
            proposal=2.0,
        )
        CASES[f"{_variant}, classes of four"] = Case(
            FOUR,
            _variant,
            labels=(([0, 1], [1]), ([1, 1, 0, 5], [0, 0]), ([2, 0], [2, 9, 0]), ([4, 1], [1])),
        )
        CASES[f"{_variant}, classes and NaN"] = Case(
            EQUAL,
            _variant,
            bad=((0, "neg", (0, 1)), (1, "pos", (3,))),
            labels=(([0, 1, 2, 2], [0, 1, 2]), ([0, 1, 2, 3], [1, 1, 3])),
        )
        # A label that float32 would round to its neighbour's.
        CASES[f"{_variant}, large labels in float32"] = Case(
            EQUAL,
            _variant,
            dtype=torch.float32,
            labels=(([2**24, 2**24 + 1, 0, 0], [0, 0, 2**24]), ([0, 0, 0, 0], [0, 0, 2**24 + 1])),
        )
        CASES[f"{_variant}, no partner anywhere"] = Case(
            EQUAL, _variant, labels=(([0, 0, 0, 0], [1, 1, 1]), ([2, 2, 2, 2], [3, 3, 3]))
        )
