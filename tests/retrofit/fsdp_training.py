"""A few guarded steps on one process, or as one of several ranks with DDP or FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ebmguard import Guard, guard
from ebmguard.energies import Variant
from tests.parts import climb

STEPS = 3
EPOCH = 2  # steps, of which the last one has parts of unequal size

Parallel = Literal["ddp", "fsdp", "fsdp, root alone", "hsdp"]


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is spread over the ranks."""

    parallel: Parallel
    variant: Variant = "default"
    optimizer: Literal["adam", "fused adam", "momentum"] = "adam"
    passes: int = 1  # one forward pass of positives and negatives together, or one of each
    has_groups: bool = False
    reweights: bool = False  # the energies, for a plain difference of means
    gathers_once: bool = False  # the parameters, for a whole chain


CASES: dict[str, Case] = {
    "ddp": Case("ddp"),
    "ddp, no_pos": Case("ddp", "no_pos", "momentum", passes=2),
    "ddp, groups": Case("ddp", has_groups=True),
    "ddp, reweighted": Case("ddp", reweights=True),
    "fsdp": Case("fsdp"),
    "fsdp, no_pos": Case("fsdp", "no_pos", "momentum", passes=2, gathers_once=True),
    "fsdp, groups": Case("fsdp", has_groups=True),
    "fsdp, fused": Case("fsdp, root alone", optimizer="fused adam", passes=2),
    "hsdp": Case("hsdp"),
}


FOUR = ("fsdp, groups", "hsdp")


def cases(world: int) -> dict[str, Case]:
    """Those of so many ranks: on four, which take longer, what is sharded, and copies of shards."""
    return {
        name: case
        for name, case in CASES.items()
        if (name in FOUR if world == 4 else name != "hsdp")
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


def gathered_once(f: FSDPModule, x: Tensor) -> Tensor:
    """Climbs, keeping the parameters between the steps of the chain."""
    f.set_reshard_after_forward(False)
    f.set_reshard_after_backward(False)
    x = climb(f, x)
    f.set_reshard_after_forward(True)
    f.set_reshard_after_backward(True)
    return x


def spread(net: nn.Module, parallel: Parallel) -> nn.Module:
    """The module to train: the same one, sharded, or a wrapper around it."""
    if parallel == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if parallel == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    if parallel != "fsdp, root alone":
        for layer in net.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def make_optimizer(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "momentum":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(net.parameters(), lr=0.01, fused=case.optimizer == "fused adam")


def whole(x: Tensor) -> Tensor:
    """All of a tensor, from the parts of all ranks."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


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
    model: nn.Module = net if rank is None else spread(net, case.parallel)
    optimizer = make_optimizer(case, net)
    sample = gathered_once if case.gathers_once and rank is not None else climb
    g: Guard = guard(
        None, sample, beta_star=0.7, output_scale=2.0, variant=case.variant, process_group=group
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
        gradients.append([whole(p.grad) for p in net.parameters() if p.grad is not None])
        optimizer.step()
        rows.append(dict(g.last))
    return {
        "parameters": [whole(p) for p in net.parameters()],
        "gradients": gradients,
        "rows": rows,
    }
