"""One rank: runs every case, and writes what it saw to a file.

Started as ``python -m tests.objective.ranks_process RANK FOLDER`` from the project's root. The test
that joins the results reads the cases, too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ebmguard.energies import Variant
from ebmguard.errors import ConfigError
from ebmguard.objective import coefficients, contrastive_loss
from tests.objective.oracles import OF_CLASSES, VARIANTS
from tests.ranks import joined

WORLD = 3


@dataclass(frozen=True)
class Case:
    """One call on several ranks; the sizes are (positives, negatives) of each."""

    sizes: tuple[tuple[int, int], ...]
    variant: Variant = "default"
    beta: float | Tensor = 0.7
    bad: tuple[tuple[int, str, tuple[int, ...]], ...] = ()  # (rank, side, indices) set to NaN
    offset: float = 0.0
    dtype: torch.dtype = torch.float64
    labels: tuple[tuple[list[int], list[int]], ...] = ()  # of each rank's positives and negatives
    scales: tuple[float, ...] = ()  # the output scale of each class
    proposal: float | None = None  # log q has this offset

    def rank(self, rank: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Energies that differ in level from rank to rank, and what else the loss is given."""
        rng = torch.Generator().manual_seed(rank)
        drawn = {
            name: torch.randn(size, generator=rng, dtype=torch.float64) * 2 + self.offset + rank
            for name, size in zip(("pos", "neg"), self.sizes[rank], strict=True)
        }
        given: dict[str, Any] = {"variant": self.variant}
        if self.proposal is not None:  # each rank draws from one of its own
            q_pos, q_neg = (
                torch.randn(len(f), generator=rng, dtype=f.dtype) + self.proposal - rank
                for f in drawn.values()
            )
            drawn |= {"q_pos": q_pos, "q_neg": q_neg}
        for broken, side, where in self.bad:
            if broken == rank:
                drawn[side][list(where)] = torch.nan
        drawn = {name: x.to(self.dtype) for name, x in drawn.items()}
        if self.proposal is not None:
            given["log_q"] = drawn["q_pos"], drawn["q_neg"]
        if self.labels:
            y_pos, y_neg = (torch.tensor(y) for y in self.labels[rank])
            scales = torch.tensor(self.scales, dtype=self.dtype)
            given["groups"] = (y_pos, y_neg, scales[y_pos]) if self.scales else (y_pos, y_neg)
        return (drawn["pos"], drawn["neg"]), given


EQUAL = ((4, 3), (4, 3))
UNEVEN = ((4, 1), (6, 5))
THREE = ((2, 3), (6, 1), (4, 4))
# Class 2 has negatives on the other rank only, class 3 is nobody else's, 5 has none at all.
LABELS = ([0, 2, 3, 5], [3]), ([0, 1, 0, 1, 2, 5], [0, 1, 2, 0, 2])

OF_ALL = {
    "uneven": Case(UNEVEN),
    "three": Case(THREE, beta=-0.7),
    "three and a proposal": Case(THREE, proposal=-3.0),
    "a tensor of 0, NaN on one rank": Case(
        UNEVEN, beta=torch.tensor(0.0), bad=((1, "pos", (0, 5)), (1, "neg", (2,)))
    ),
    "a rank without usable negatives": Case(EQUAL, bad=((0, "neg", (0, 1, 2)), (1, "pos", (0, 1)))),
    "a rank whose log q is lost": Case(EQUAL, bad=((0, "q_neg", (0, 1, 2)),), proposal=0.0),
    "float32 far from zero": Case(UNEVEN, offset=-1e5, dtype=torch.float32, proposal=-1e5),
    "no usable negative anywhere": Case(EQUAL, bad=((0, "neg", (0, 1, 2)), (1, "neg", (0, 1, 2)))),
}
OF_SOME = {
    "classes": Case(UNEVEN, labels=LABELS),
    "classes, scales and a proposal": Case(
        UNEVEN, beta=-0.7, labels=LABELS, scales=(0.25, 1, 3, 2, 1, 0.5), proposal=2.0
    ),
    # A label that float32 would round to its neighbour's.
    "large labels in float32": Case(
        EQUAL,
        dtype=torch.float32,
        labels=(([2**24, 2**24 + 1, 0, 0], [0, 0, 2**24]), ([0, 0, 0, 0], [0, 0, 2**24 + 1])),
    ),
}
CASES = {
    f"{variant}, {name}": replace(case, variant=variant)
    for cases, variants in ((OF_ALL, VARIANTS), (OF_SOME, OF_CLASSES))
    for variant in variants
    for name, case in cases.items()
}


def _run(case: Case, rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    (pos, neg), given = case.rank(rank)
    leaves = pos.requires_grad_(), neg.requires_grad_()
    loss = contrastive_loss(*leaves, case.beta, process_group=group, **given)
    return {
        "loss": loss.detach(),
        "sides": torch.autograd.grad(loss, leaves),
        "closed": coefficients(*leaves, case.beta, process_group=group, **given),
    }


# What the last rank passes to the loss instead of what all others do.
DISAGREEING: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "'no_pos'": {"variant": "no_pos"},
    "0.9": {"beta": 0.9},
    "log_q with,": {"proposal": 0.0},
}


def _refused(other: dict[str, Any], rank: int, group: dist.ProcessGroup) -> str:
    """The words of the error where one rank differs, which all get; the group works on."""
    case = Case(THREE, **(other if rank == WORLD - 1 else {}))
    (pos, neg), given = case.rank(rank)
    try:
        contrastive_loss(pos, neg, case.beta, process_group=group, **given)
    except ConfigError as error:
        return str(error)
    return ""


def main(rank: int, folder: Path) -> None:
    with joined(rank, WORLD, folder):
        groups = {size: dist.new_group(list(range(size))) for size in range(2, WORLD + 1)}
        results: dict[str, Any] = {}
        for name, case in CASES.items():
            if rank < len(case.sizes):
                results[name] = _run(case, rank, groups[len(case.sizes)])
        results["refused"] = {
            words: _refused(other, rank, groups[WORLD]) for words, other in DISAGREEING.items()
        }
        torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
