"""What the checks look at of a guard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..check import Setup
from .strength import StrengthAt

__all__ = ["setup_of"]


def setup_of(
    loop: Any, strength: StrengthAt, example: Tensor | None = None, *, is_running: bool = False
) -> Setup:
    """The setup of a :class:`~.loop.Loop`, which imports this, at a step's strength."""
    settings, recoverer = loop.settings, loop.actions.recoverer
    found = loop.first_calls.result
    awaits = loop.strength.awaits_scale and loop.first_calls.calls_left > 0
    in_group = dist.is_available() and dist.is_initialized()
    followed: Iterable[str] = ()
    if recoverer is not None and not is_running:
        followed = recoverer.settings.not_followed(loop.situation)
    return Setup(
        trainer=loop.trainer,
        has_sampler=loop.has_sampler or loop.is_inline,
        beta_star=strength.numbers[0],
        output_scale=strength.output_scale,
        tempers=loop.strength.tempers or awaits,
        measured="" if found is None else str(found),
        factor=strength.numbers[1],
        sign=settings.sign,
        action=settings.action,
        judge_in_loss=settings.judge_in_loss,
        has_sinks=bool(loop.writer.sinks),
        is_distributed=in_group and dist.get_world_size() > 1,
        joins_ranks=settings.process_group is not None,
        models=len(settings.models),
        not_followed=tuple(followed),
        chains="" if recoverer is None else recoverer.chains.found,
        unknown=loop.self_check.unknown,
        is_running=is_running,
        example=example,
    )
