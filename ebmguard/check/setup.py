"""What the checks look at: a trainer as its guard knows it, before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Setup"]


@dataclass(frozen=True)
class Setup:
    """A guard and what was attached to it. None stands for what the guard was not told.

    Attributes:
        model: the energy module.
        optimizer, scheduler, scaler, ema, buffer, generators: the rest of the training state.
        step_size, noise_std, clamp: the sampler's settings.
        has_sampler: whether the guard runs a sampler.
        beta_star: the exponents of the first step, one for each member or entry of ``beta_stars``.
        output_scale: o, for which the sampler's update is a correct Langevin step for exp(o f).
        tempers: whether the sampler's side is defined at all.
        factor: what multiplies the energy during sampling at the first step.
        sign: 1 where f is high on data, -1 where it is low.
        action: what an ERROR leads to.
        hold: as it was given.
        has_sinks: whether rows are written anywhere.
        is_distributed: whether several ranks train, and whether the guard joins their samples.
        models: number of model dimensions of an ensemble.
        example: a batch of inputs to try the model on.
    """

    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    ema: Any = None
    buffer: Any = None
    generators: tuple[torch.Generator, ...] = ()
    step_size: float | None = None
    noise_std: float | None = None
    clamp: tuple[float, float] | None = None
    has_sampler: bool = True
    beta_star: tuple[float, ...] = (0.5,)
    output_scale: float | None = None
    tempers: bool = False
    factor: tuple[float, ...] = (1.0,)
    sign: int = 1
    action: str = "warn"
    hold: bool | None = None
    has_sinks: bool = True
    is_distributed: bool = False
    joins_ranks: bool = False
    models: int = 0
    example: Tensor | None = None
