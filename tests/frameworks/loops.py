"""A plain loop on Fabric or on accelerate; on accelerate on one process or as one of two.

Started as ``python -m tests.frameworks.loops RANK FOLDER`` from the project's root.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor

from ebmguard import guard
from ebmguard.adapters import accelerate, fabric
from tests.frameworks.parts import N_BATCHES, OUTPUT_SCALE, STEP_SIZE, Sampler, data, make_net
from tests.parts import difference

__all__ = ["OnAccelerate", "OnFabric", "Run"]


class Run:
    """A trainer.

    Args:
        framework: wraps network and optimizer.
        options: of the guard; None leaves it out.
        by: the chains follow the "original" network or its "wrapper".
        accumulated: batches of a step.
    """

    adapter: Any

    def __init__(
        self,
        framework: Any,
        options: dict[str, Any] | None = None,
        *,
        sgd: bool = False,
        by: str = "original",
        accumulated: int = 1,
    ) -> None:
        torch.manual_seed(0)
        self.framework, self.accumulated = framework, accumulated
        self.net = make_net()
        optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.5)
        if not sgd:
            optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01, betas=(0.0, 0.999))
        self.model, self.optimizer = self.wrapped(optimizer)
        self.chains = Sampler(self.net if by == "original" else self.model)
        self.sampler: Any = self.chains
        self.loss_fn: Any = difference
        self.seen: list[tuple[Tensor, Tensor]] = []
        if options is not None:
            g = guard(
                None,
                self.chains,
                methods=("sample_new_exmps", "generate_samples"),
                model=self.net,
                process_group=dist.group.WORLD,  # None on one process
                **{"beta_star": 0.5, "output_scale": OUTPUT_SCALE, **options},
            )
            attach = self.adapter.attach
            self.loss_fn, self.sampler = attach(g, framework, optimizer=self.optimizer)

    def wrapped(self, optimizer: Any) -> Any:
        raise NotImplementedError

    def train(self, epochs: int = 1, n_batches: int = N_BATCHES) -> None:
        for _ in range(epochs):
            for i, (real,) in enumerate(self.loader):
                if i < n_batches:
                    self.step(i, real, lambda: self.sampler.sample_new_exmps(steps=4))

    def step(self, i: int, real: Tensor, draw: Any) -> None:
        raise NotImplementedError

    @property
    def loader(self) -> Any:
        return data()

    def loss(self, real: Tensor, draw: Any) -> Tensor:
        fake = draw()
        self.seen.append((real, fake.detach().clone()))
        real_out, fake_out = self.model(torch.cat((real, fake))).chunk(2)
        regular = 0.1 * (real_out**2 + fake_out**2).mean()
        loss: Tensor = regular + self.loss_fn(real_out, fake_out)
        return loss

    def tensors(self) -> list[Tensor]:
        states = self.optimizer.optimizer.state.values()
        moments = [x for state in states for x in state.values()]
        rng = torch.get_rng_state()
        everything = [*self.net.state_dict().values(), *self.chains.examples, rng, *moments]
        return [x.clone() for x in everything]


class OnFabric(Run):
    adapter = fabric

    def __init__(self, options: Any = None, *, fabric: Any = None, **more: Any) -> None:
        super().__init__(fabric or Fabric(accelerator="cpu", devices=1), options, **more)

    def wrapped(self, optimizer: Any) -> Any:
        return self.framework.setup(self.net, optimizer)

    def step(self, i: int, real: Tensor, draw: Any) -> None:
        self.framework.backward(self.loss(real, draw) / self.accumulated)
        if (i + 1) % self.accumulated == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        state = {"model": self.model, "optimizer": self.optimizer, "chains": self.chains}
        return state | {"guard": self.loss_fn.guard, "random": torch.get_rng_state()}

    def save(self, folder: Path) -> None:
        self.framework.save(folder / "state", self.state)

    def load(self, folder: Path) -> None:
        self.framework.load(folder / "state", state := self.state)
        torch.set_rng_state(state["random"])


class OnAccelerate(Run):
    adapter = accelerate

    def __init__(
        self,
        options: Any = None,
        *,
        accelerator: Any = None,
        accumulated: int = 1,
        **more: Any,
    ) -> None:
        own = accelerator or Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        super().__init__(own, options, **more)
        own.register_for_checkpointing(self.chains)

    def wrapped(self, optimizer: Any) -> Any:
        *wrapped, self.prepared = self.framework.prepare(self.net, optimizer, data())
        return wrapped

    @property
    def loader(self) -> Any:
        return self.prepared

    def step(self, i: int, real: Tensor, draw: Any) -> None:
        with self.framework.accumulate(self.model):
            self.framework.backward(self.loss(real, draw))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self.framework.save_state(folder)

    def load(self, folder: Path) -> None:
        self.framework.load_state(folder)

    def train_on_rank(self) -> list[Tensor]:
        """Chains without noise, so that they are the same on any rank; then the parameters."""
        ranks = self.framework.process_index, self.framework.num_processes
        for i, (real,) in enumerate(data(*ranks)):
            chains = (self.net, -real, 2, STEP_SIZE, 0.0)
            self.step(i, real, lambda chains=chains: self.sampler.generate_samples(*chains))
        return [p.detach() for p in self.net.parameters()]


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = "2"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = (folder / "port").read_text()
    run = OnAccelerate({"beta_star": 2.0})
    torch.save(run.train_on_rank(), folder / f"{rank}.pt")
    run.framework.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
