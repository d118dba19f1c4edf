"""From a guard to what the checks look at."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ..check import Setup
from ..errors import ConfigError

if TYPE_CHECKING:
    from .guard import Guard

__all__ = ["setup_of"]


def setup_of(guard: Guard, example: Tensor | None) -> Setup:
    """What a guard knows of its trainer, at its present step.

    Raises:
        ConfigError: the example is not a tensor.
    """
    if example is not None and not isinstance(example, Tensor):
        raise ConfigError(
            f"g.check: example= is a {type(example).__name__}; expected a batch of inputs, a "
            "tensor, as the model gets them."
        )
    known = {each.name for each in fields(Setup)}
    attached = {
        each.name: getattr(guard.attached, each.name)
        for each in fields(guard.attached)
        if each.name in known and each.name != "model"
    }
    strength = guard._course.strength_at(guard.step)
    return Setup(
        **attached,
        model=guard._sampling.model,
        has_sampler=guard.sampler is not None or guard._inline,
        beta_star=_numbers(strength.beta_star),
        output_scale=guard._strength.output_scale,
        tempers=guard._strength.tempers,
        factor=_numbers(strength.factor),
        sign=guard._sign,
        action=guard._alarm._action,
        hold=guard._journal._hold,
        has_sinks=bool(guard._journal._monitor.sinks),
        is_distributed=dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1,
        joins_ranks=guard._options.process_group is not None,
        models=len(strength.models),
        example=example,
    )


def _numbers(value: float | Tensor | tuple[float | Tensor, ...]) -> tuple[float, ...]:
    """Read on the host: a check comes before the first step, and nothing is waiting."""
    if isinstance(value, tuple):
        return tuple(number for each in value for number in _numbers(each))
    if isinstance(value, Tensor):
        return tuple(float(each) for each in value.flatten().tolist())
    return (float(value),)
