"""What ``guard()`` was told once and for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from ..ranks import Ranks, check_shards
from ..trainer import Told, Trainer, check_takes
from .ensemble import Variants

__all__ = ["Action", "Settings", "check_told"]

Action: TypeAlias = Literal["warn", "raise", "rollback"]


@dataclass(frozen=True)
class Settings:
    """Arguments of :func:`ebmguard.guard` that hold for the whole run."""

    sign: int  # 1 where the network's output is high on data, -1 where it is low
    variant: Variants
    models: torch.Size  # model dimensions of an ensemble; none for a single model
    reference_beta_star: float
    action: Action
    judge_in_loss: bool | None
    process_group: dist.ProcessGroup | None

    @property
    def sample_dim(self) -> int:
        """The dimension of energies that counts samples."""
        return len(self.models)

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together."""
        return Ranks(self.process_group)


def check_told(
    trainer: Trainer, told: Told, sampler: object, process_group: dist.ProcessGroup | None
) -> Trainer:
    """A trainer and what the guard of this sampler is told of it now, else a ``ConfigError``."""
    trainer = trainer.extended(**told)
    if trainer.optimizer is not None:
        trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        check_shards(trained, process_group)
    if trainer.steps_argument is not None:
        check_takes(sampler, trainer.steps_argument)
    return trainer
