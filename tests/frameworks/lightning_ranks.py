"""A guarded module on one process, or on one of two ranks of Lightning's DDP.

Started as ``python -m tests.frameworks.lightning_ranks RANK FOLDER`` from the project's root.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from ebmguard import guard
from ebmguard.adapters.lightning import GuardedModule
from tests.frameworks.lightning_parts import make_trainer
from tests.frameworks.parts import Sampler, data, make_net
from tests.recovery.parts import Scripted


class OnRanks(GuardedModule, LightningModule):
    """Makes its guard where the ranks know each other; its chains have no noise."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.cnn: nn.Module = make_net()
        self.rows: list[dict[str, float]] = []

    def setup(self, stage):
        self.loss_fn, self.draw = guard(
            None,
            self.climb,
            model=self.cnn,
            beta_star=2.0,
            output_scale=4.0,
            action="warn",
            process_group=dist.group.WORLD if self.joined else None,
        )
        self.loss_fn.guard._loop.judge = Scripted([3])

    def climb(self, x):
        return Sampler.generate_samples(self.cnn, x, steps=2, step_size=0.5, noise=0.0)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        real_out, fake_out = self.cnn(torch.cat((real, self.draw(-real)))).chunk(2)
        return self.loss_fn(real_out, fake_out)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rows.append(dict(self.loss_fn.guard.last))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Said(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_on_ranks(trainer: Trainer, joined: bool) -> dict[str, Any]:
    """What the run leaves behind on this rank."""
    seed_everything(0, verbose=False)
    model, said = OnRanks(joined), Said()
    logger = logging.getLogger("ebmguard")
    logger.addHandler(said)
    trainer.fit(model, data(trainer.global_rank, trainer.world_size))
    logger.removeHandler(said)
    return {
        "parameters": model.state_dict(),
        "rows": model.rows,
        "alerts": [alert.rule for alert in model.loss_fn.guard.alerts],
        "said": said.messages,
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = (folder / "port").read_text()
    ddp: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    results = [train_on_ranks(make_trainer(**ddp), joined) for joined in (True, False)]
    torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
