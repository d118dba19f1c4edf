"""What ``guard()`` was told once and for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from ..energies import Reduce, Variants
from ..ranks import Ranks
from ..shards import check_shards
from ..trainer import Trainer
from .callables import check_takes

__all__ = ["Action", "Settings", "check_told"]

Action: TypeAlias = Literal["warn", "raise", "rollback"]


@dataclass(frozen=True)
class Settings:
    """Facts that hold for the whole run; every part has them from here.

    Attributes:
        sign: 1 where the network's output is high on data, -1 where it is low.
        variant, reduce: of the objective.
        models: model dimensions of an ensemble; none for a single model.
        reference_beta_star: exponent of the diagnostics under ``ref/``.
        action: what an ERROR leads to.
        judge_in_loss: whether a step is judged inside its loss; None: on a CPU.
        process_group: the ranks that train together; None for a single process.
    """

    sign: int
    variant: Variants
    reduce: Reduce
    models: torch.Size
    reference_beta_star: float
    action: Action
    judge_in_loss: bool | None
    process_group: dist.ProcessGroup | None

    @property
    def objective(self) -> dict[str, Any]:
        """The keywords of every call of the objective."""
        return {
            "variant": self.variant,
            "reduce": self.reduce,
            "process_group": self.process_group,
        }

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together."""
        return Ranks(self.process_group)

    @property
    def members(self) -> int:
        """Number of models of an ensemble; 0 for a single model."""
        return self.models.numel() if self.models else 0


def check_told(
    trainer: Trainer,
    told: Mapping[str, Any],
    sampler: object,
    process_group: dist.ProcessGroup | None,
) -> Trainer:
    """A trainer and what the guard of this sampler is told of it now.

    Raises:
        ConfigError: what cannot be meant.
    """
    trainer = trainer.extended(energy=trainer.model, **told)
    if trainer.optimizer is not None:
        trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        check_shards(trained, process_group)
    if trainer.steps_argument is not None:
        check_takes(sampler, trainer.steps_argument)
    return trainer
