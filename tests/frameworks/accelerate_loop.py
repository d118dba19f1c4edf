"""A trainer on accelerate, on one process or as one of two.

Started as ``python -m tests.frameworks.accelerate_loop RANK FOLDER`` from the project's root.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from ebmguard import guard
from ebmguard.adapters.accelerate import attach
from tests.frameworks.parts import (
    N_BATCHES,
    OUTPUT_SCALE,
    STEP_SIZE,
    Sampler,
    data,
    make_net,
)
from tests.parts import difference


def make_accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


class Run:
    """A trainer; ``options`` are the guard's, and None leaves it out."""

    def __init__(
        self,
        options: dict[str, Any] | None,
        accelerator: Accelerator,
        *,
        sgd: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator
        self.net = make_net()
        optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.5)
        if not sgd:
            optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01, betas=(0.0, 0.999))
        self.model, self.optimizer, self.loader = accelerator.prepare(self.net, optimizer, data())
        self.chains = Sampler(self.net)
        self.sampler: Any = self.chains
        self.loss_fn: Any = difference
        self.seen: list[tuple[Tensor, Tensor]] = []
        accelerator.register_for_checkpointing(self.chains)
        if options is not None:
            g = guard(
                None,
                self.chains,
                methods=("sample_new_exmps", "generate_samples"),
                model=self.net,
                process_group=dist.group.WORLD,  # None on one process,
                **{"beta_star": 0.5, "output_scale": OUTPUT_SCALE, **options},
            )
            self.loss_fn, self.sampler = attach(g, accelerator, optimizer=self.optimizer)

    def train(self, epochs: int = 1, n_batches: int = N_BATCHES) -> None:
        for _ in range(epochs):
            for i, (real,) in enumerate(self.loader):
                if i < n_batches:
                    self.step(real, lambda: self.sampler.sample_new_exmps(steps=4))

    def step(self, real: Tensor, draw: Any) -> None:
        with self.accelerator.accumulate(self.model):
            fake = draw()
            self.seen.append((real, fake.detach().clone()))
            real_out, fake_out = self.model(torch.cat((real, fake))).chunk(2)
            loss = 0.1 * (real_out**2 + fake_out**2).mean() + self.loss_fn(real_out, fake_out)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train_on_rank(self) -> list[Tensor]:
        """Chains without noise, so that they are the same on any rank; then the parameters."""
        accelerator = self.accelerator
        for (real,) in data(accelerator.process_index, accelerator.num_processes):
            chains = (self.net, -real, 2, STEP_SIZE, 0.0)
            self.step(real, lambda chains=chains: self.sampler.generate_samples(*chains))
        return [p.detach() for p in self.net.parameters()]

    def tensors(self) -> list[Tensor]:
        states = self.optimizer.optimizer.state.values()
        moments = [x for state in states for x in state.values()]
        rng = torch.get_rng_state()
        everything = [*self.net.state_dict().values(), *self.chains.examples, rng, *moments]
        return [x.clone() for x in everything]


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = "2"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = (folder / "port").read_text()
    run = Run({"beta_star": 2.0}, make_accelerator())
    torch.save(run.train_on_rank(), folder / f"{rank}.pt")
    run.accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
