"""A small run with snapshots on the disk, and its bits, for what kills and damages it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ebmguard import Guard, Recovery, guard
from ebmguard.samplers import ReplayBuffer, sgld


def begun(folder: Path) -> Guard:
    """The guard of a new run with Adam, batch norm, a schedule and a replay buffer."""
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 1))
    told: dict[str, Any] = {"model": f, "optimizer": torch.optim.Adam(f.parameters())}
    told["scheduler"] = torch.optim.lr_scheduler.StepLR(told["optimizer"], 7)
    told["buffer"] = ReplayBuffer(32, (2,), reinit_rate=0.1, generator=torch.Generator())
    recovery = Recovery(every=2, certify_after=2, folder=folder, folder_every=4)
    sampler = partial(sgld, steps=2, step_size=0.1, noise_std=0.03)
    return guard(None, sampler, beta_star=0.5, action="rollback", recovery=recovery, **told)


def train(g: Guard, steps: int) -> None:
    """So many steps of it."""
    told: Any = g.trainer
    f, buffer, optimizer = told.model, told.buffer, told.optimizer
    for _ in range(steps):
        x, rows = buffer.sample(8)
        buffer.write(rows, q := g.sampler(f, x))
        optimizer.zero_grad()
        g.loss(f(torch.randn(8, 2)), f(q)).backward()
        optimizer.step()
        told.scheduler.step()


def leaves_of(tree: Any) -> list[Any]:
    """The bits of all values and tensors in nested containers."""
    leaves, way = tree_flatten(tree)
    return [way, *(x.numpy().tobytes() if isinstance(x, Tensor) else repr(x) for x in leaves)]


def bits(g: Guard) -> list[Any]:
    """Of all that a resume may change."""
    told: Any = g.trainer
    parts = (told.model, told.optimizer, told.scheduler, told.buffer, g)
    return leaves_of([[x.state_dict() for x in parts], torch.get_rng_state()])
