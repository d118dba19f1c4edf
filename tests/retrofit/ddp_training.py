"""A few guarded steps on one process, or as one of several ranks with DDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ebmguard import Guard, guard
from ebmguard.energies import Variant
from tests.parts import climb

STEPS = 3
EPOCH = 2  # steps, of which the last one has parts of unequal size


@dataclass(frozen=True)
class Case:
    """What is trained."""

    variant: Variant = "default"
    optimizer: Literal["adam", "fused adam", "momentum"] = "adam"
    passes: int = 1  # one forward pass of positives and negatives together, or one of each
    has_groups: bool = False
    reweights: bool = False  # the energies, for a plain difference of means


CASES: dict[str, Case] = {
    "plain": Case(),
    "no_pos": Case("no_pos", "momentum", passes=2),
    "groups": Case(has_groups=True),
    "reweighted": Case(reweights=True),
    "fused": Case(optimizer="fused adam", passes=2),
}


class Energy(nn.Module):
    """A small network, none of whose sizes divides by a number of ranks.

    Without a last bias: a contrastive loss does not depend on it, and Adam would amplify roundings.
    """

    def __init__(self) -> None:
        super().__init__()
        f64 = torch.float64
        self.layers = nn.Sequential(
            nn.Linear(2, 9, dtype=f64),
            nn.Tanh(),
            nn.Linear(9, 5, dtype=f64),
            nn.Tanh(),
            nn.Linear(5, 1, bias=False, dtype=f64),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output.sum(-1)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positives and starts of negatives of a rank, and the class of each."""
    rng = torch.Generator().manual_seed(100 * step + rank)
    is_last = step % EPOCH == EPOCH - 1
    n, m = (3 + 2 * (rank % 2), 2 + rank) if is_last else (6, 4)
    x = torch.randn(n + m, 2, generator=rng, dtype=torch.float64) + 0.5 * rank
    y = torch.randint(3, (n + m,), generator=rng)
    return x[:n], 2 * x[n:], y[:n], y[n:]


def make_optimizer(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "momentum":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(net.parameters(), lr=0.01, fused=case.optimizer == "fused adam")


def train(case: Case, world: int, rank: int | None = None) -> dict[str, Any]:
    """Parameters and gradients of a few steps, and the rows of the guard.

    Args:
        case: what is trained.
        world: number of ranks.
        rank: this one, or None for one process with the joined batch.
    """
    torch.manual_seed(0)
    net = Energy()
    group = None if rank is None else dist.group.WORLD
    model: nn.Module = net if rank is None else DistributedDataParallel(net)
    optimizer = make_optimizer(case, net)
    g: Guard = guard(
        None, climb, beta_star=0.7, output_scale=2.0, variant=case.variant, process_group=group
    )
    g.attach(model=net, optimizer=optimizer)
    gradients, rows = [], []
    for step in range(STEPS):
        of_ranks = [batch(step, each) for each in (range(world) if rank is None else [rank])]
        x_pos, x_neg, y_pos, y_neg = (torch.cat(part) for part in zip(*of_ranks, strict=True))
        x_neg = g.sampler(net, x_neg)
        if case.passes == 1:
            f_pos, f_neg = model(torch.cat((x_pos, x_neg))).split((len(x_pos), len(x_neg)))
        else:
            f_pos, f_neg = model(x_pos), model(x_neg)
        groups = (y_pos, y_neg) if case.has_groups else None
        if case.reweights:
            f_pos, f_neg = g.reweight(f_pos, f_neg, groups)
            loss = f_neg.mean() - f_pos.mean()
        else:
            loss = g.loss_fn(f_pos, f_neg, groups)
        optimizer.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        optimizer.step()
        rows.append(dict(g.last))
    return {
        "parameters": [p.detach().clone() for p in net.parameters()],
        "gradients": gradients,
        "rows": rows,
    }
