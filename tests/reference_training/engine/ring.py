"""A fourth trainer, written against the engine's `Task`: a quadratic f on points of a ring.

``python -m tests.reference_training.engine.ring --out DIR ...`` trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import tyro
from torch import nn

from ebmguard import guard
from ebmguard.reference_training.engine import loop
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks
from ebmguard.reference_training.engine.record import Record
from ebmguard.reference_training.engine.run_config import RunConfig
from ebmguard.reference_training.engine.task import Streams, Task
from ebmguard.samplers import sgld


@dataclass(frozen=True)
class RingConfig(RunConfig):  # type: ignore[misc]  # mypy cannot follow the mapped package
    """Train on a ring."""

    iterations: int = 12
    lr: float = 0.02
    checkpoint_every: int = 4
    threads: int = 1
    words: ClassVar[tuple[str, ...]] = ("tests.reference_training.engine.ring",)
    shown: ClassVar[tuple[str, ...]] = ("iterations",)

    @property
    def total_steps(self) -> int:
        return self.iterations

    def check(self, ranks: Ranks = ONE_RANK) -> None:
        """Every setting can be meant."""


class Ring(Task):  # type: ignore[misc]
    title = "a ring"

    def __init__(self, config: RingConfig, record: Record) -> None:
        torch.manual_seed(config.seed)
        self.config, self.record = config, record
        self.points = torch.Generator().manual_seed(record.ranks.own_seed(config.seed))
        f = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 1), nn.Flatten(0))
        self.f, self.optimizer = f, torch.optim.Adam(f.parameters(), lr=config.lr)
        self.energies = record.ranks.parallel(f)
        sampler = partial(sgld, steps=5, step_size=0.1, noise_std=0.1, generator=self.points)
        g = guard(None, sampler, beta_star=0.5, action="rollback", **record.for_guard)
        g.attach(model=f, optimizer=self.optimizer, generators=[self.points])
        self.loss_fn, self.sample_q = g
        self.guards = {"guard": self.loss_fn.guard}
        self.parts = {
            "network": f,
            "optimizer": self.optimizer,
            "points": Streams({"points": self.points}),
        }

    def step(self, step: int) -> torch.Tensor:
        angle = 6.3 * torch.rand(16, generator=self.points)
        x_pos = torch.stack((angle.cos(), angle.sin()), 1)
        x_neg: torch.Tensor = self.sample_q(
            self.f, 2 * torch.rand(16, 2, generator=self.points) - 1
        )
        f_pos, f_neg = self.energies(torch.cat((x_pos, x_neg))).split(16)
        loss = self.loss_fn(f_pos, f_neg)
        self.optimizer.zero_grad()
        loss.backward()
        own = {"gap": f_pos.mean() - f_neg.mean(), "radius": x_neg.norm(dim=1).mean()}
        self.loss_fn.guard.log(self.record.ranks.means(own))
        self.optimizer.step()
        return x_neg

    def results(self) -> dict[str, Any]:
        last = [row["energy_gap"] for row in self.record.guard_rows()]
        return {"gap": last[-1] if last else None}


train = partial(loop.train, Ring)


if __name__ == "__main__":
    config = tyro.cli(RingConfig)
    raise SystemExit(loop.launch(train, lambda results: f"gap {results['gap']}", config))
