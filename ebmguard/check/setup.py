"""What the checks look at: a trainer as its guard knows it, before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..trainer import Trainer

__all__ = ["Setup"]


@dataclass(frozen=True)
class Setup:
    """A guard and what :func:`ebmguard.guard` was told; None stands for what it was not.

    Attributes:
        trainer: the rest of the training state, and the sampler's settings.
        beta_star: the exponents of the first step, one for each member or entry of ``beta_stars``.
        tempers: whether the sampler's side is defined at all.
        factor: what multiplies the energy during sampling at the first step.
        sign: 1 where f is high on data, -1 where it is low.
        is_distributed: whether several ranks train, and whether the guard joins their samples.
        models: number of model dimensions of an ensemble.
        not_followed: in words, what a rollback would change but cannot in this run.
        example: a batch of inputs to try the model on.
    """

    trainer: Trainer
    has_sampler: bool = True
    beta_star: tuple[float, ...] = (0.5,)
    output_scale: float | None = None
    tempers: bool = False
    factor: tuple[float, ...] = (1.0,)
    sign: int = 1
    action: str = "warn"
    judge_in_loss: bool | None = None
    has_sinks: bool = True
    is_distributed: bool = False
    joins_ranks: bool = False
    models: int = 0
    not_followed: tuple[str, ...] = ()
    example: Tensor | None = None
