"""A few guarded steps, on one process or as one of two ranks.

Started as ``python -m tests.retrofit.ranks_training RANK FOLDER`` from the project's root.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ebmguard import guard
from ebmguard.energies import Variant
from tests.parts import Energy, climb
from tests.ranks import joined

WORLD = 2
STEPS = 5
VARIANTS: tuple[Variant, ...] = ("default", "no_pos", "batch", "true")


@dataclass(frozen=True)
class Case:
    """The sizes are (positives, negatives) of each rank."""

    sizes: tuple[tuple[int, int], ...]
    variant: Variant = "default"
    betas: tuple[float, ...] = ()  # of an ensemble
    spoiled: int | None = None  # a step at which a negative of the last rank is NaN
    last: tuple[tuple[int, int], ...] = ()  # other sizes of the last step
    has_classes: bool = False
    has_proposal: bool = False
    is_measured: bool = False  # the sampler, by the guard, which is not told its scale

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Positives and starting points of the negatives, rank by rank."""
        rng = torch.Generator().manual_seed(step)
        found = []
        sizes = self.last if self.last and step == STEPS - 1 else self.sizes
        for rank, (n, m) in enumerate(sizes):
            x = torch.randn(n + m, 2, generator=rng, dtype=torch.float64) + rank
            found.append((x[:n], 2 * x[n:]))
        if step == self.spoiled:
            found[-1][1][1] = torch.nan
        return found

    def batch(self, step: int, rank: int | None) -> tuple[Tensor, Tensor]:
        """A rank's batch, or without a rank the joined one."""
        batches = self.batches(step)
        if rank is not None:
            return batches[rank]
        pos, neg = (list(side) for side in zip(*batches, strict=True))
        return torch.cat(pos), torch.cat(neg)


class Climbs:
    """As :func:`climb`, with the sharpness of its last call: of moves, as there is no noise."""

    def __init__(self, steps: int) -> None:
        self.steps, self.sharpness = steps, math.nan

    def __call__(self, f: nn.Module, x: Tensor) -> Tensor:
        points = [x]
        for _ in range(self.steps):
            points.append(climb(f, points[-1], steps=1))
        moves = [(after - before).flatten() for before, after in pairwise(points)]
        same = sum(float(one @ other) for one, other in pairwise(moves))
        self.sharpness = 1 - same / sum(float(one @ one) for one in moves[:-1])
        return points[-1]


EQUAL = ((6, 4), (6, 4))
UNEQUAL = ((8, 3), (2, 5))  # both halve evenly, as the joined batch does
CASES: dict[str, Case] = {
    f"{variant}, {name}": Case(sizes, variant)
    for variant in VARIANTS
    for name, sizes in (("equal", EQUAL), ("unequal", UNEQUAL))
}
CASES["ten times as many"] = Case(tuple((10 * n, 10 * m) for n, m in UNEQUAL), "true")
# Three shared samples would look like samples of three members.
CASES["ensemble"] = Case(((8, 4), (2, 5)), betas=(0.5, 0.0, -1.0))
CASES["NaN on one rank"] = Case(UNEQUAL, spoiled=STEPS - 1)
LAST = ((3, 1), (1, 2))
for variant in VARIANTS[:2]:
    CASES[f"{variant}, classes"] = Case(UNEQUAL, variant, last=LAST, has_classes=True)
    CASES[f"{variant}, proposal"] = Case(UNEQUAL, variant, last=LAST, has_proposal=True)
CASES["classes and a proposal"] = Case(UNEQUAL, has_classes=True, has_proposal=True)
CASES["no output_scale given"] = Case(UNEQUAL, is_measured=True)
CASES["classes, ten times as many"] = Case(CASES["ten times as many"].sizes, has_classes=True)
CASES["classes of an ensemble and a proposal"] = Case(
    ((8, 4), (2, 5)), betas=(0.5, 0.0, -1.0), has_classes=True, has_proposal=True
)


class Members(nn.Module):
    """An ensemble of energies, as one module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(Energy(dtype=torch.float64) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


def classes(x: Tensor) -> Tensor:
    """A class for each point: where on the first axis it is."""
    return x[:, 0].round().long()


def log_density(x: Tensor) -> Tensor:
    """Log-density of a proposal, up to a constant."""
    return -0.5 * (x - 1).square().sum(-1)


def train(case: Case, rank: int | None = None) -> dict[str, Any]:
    """Parameters after five steps, and all rows of the guard.

    Args:
        case: what is trained.
        rank: this rank, or None for one process with the joined batch.
    """
    torch.manual_seed(0)
    net: nn.Module = Members(len(case.betas)) if case.betas else Energy(dtype=torch.float64)
    group = None if rank is None else dist.group.WORLD
    model = net if rank is None else DistributedDataParallel(net, process_group=group)
    beta_star: Any = torch.tensor(case.betas, dtype=torch.float64) if case.betas else 0.7
    sampler = Climbs(3 if case.is_measured else 2)
    g = guard(
        None,
        sampler,
        beta_star=beta_star,
        output_scale=None if case.betas or case.is_measured else 2.0,
        variant=case.variant,
        process_group=group,
    )
    # Fused: whether gradients are finite is known on the device alone, as on a GPU.
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
    g.attach(optimizer=optimizer, step_size=0.1, noise_std=0.1, clamp=(-1.5, 2.0))
    rows, members, sharpness = [], [], []
    for step in range(STEPS):
        x_pos, x_neg = case.batch(step, rank)
        groups = (classes(x_pos), classes(x_neg)) if case.has_classes else None
        x_neg = g.sampler(net, x_neg)
        sharpness.append((sampler.sharpness, len(x_neg)))
        log_q = None
        if case.has_proposal:
            shape = (*beta_star.shape, -1) if case.betas else (-1,)
            log_q = log_density(x_pos).expand(shape), log_density(x_neg).expand(shape)
        f = model(torch.cat((x_pos, x_neg)))
        loss = g.loss_fn(f[..., : len(x_pos)], f[..., len(x_pos) :], groups, log_q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append(dict(g.last))
        members.append(g.members)
    return {
        "parameters": [p.detach() for p in net.parameters()],
        "rows": rows,
        "members": members,
        "sharpness": sharpness,
        "alerts": [alert.record() for alert in g.alerts],
    }


def main(rank: int, folder: Path) -> None:
    with joined(rank, WORLD, folder):
        results = {name: train(case, rank) for name, case in CASES.items()}
        torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
