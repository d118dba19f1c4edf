"""The setup that the checks examine, from a loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..check import Setup
from .strength import StrengthAt, numbers_of

__all__ = ["setup_of"]


def setup_of(
    loop: Any, now: StrengthAt, example: Tensor | None = None, *, is_running: bool = False
) -> Setup:
    """The setup of a loop, at a step's strength."""
    settings, recoverer, measured = loop.settings, loop.actions.recoverer, loop.first_calls.result
    awaits = loop.strength.awaits_scale and loop.first_calls.calls_left > 0
    followed: Iterable[str] = ()
    if recoverer is not None and not is_running:
        followed = recoverer.settings.not_followed(loop.situation)
    return Setup(
        trainer=loop.trainer,
        has_sampler=settings.has_sampler or loop.is_inline,
        beta_star=tuple(numbers_of(now.beta_star)),
        output_scale=now.output_scale,
        tempers=loop.strength.tempers or awaits,
        measured="" if measured is None else str(measured),
        factor=tuple(numbers_of(now.factor)),
        sign=settings.sign,
        action=settings.action if loop.actions.acts else "warn",
        judge_in_loss=settings.judge_in_loss,
        has_sinks=bool(loop.writer.sinks),
        misses_ranks=settings.ranks.are_unknown,
        models=len(settings.models),
        not_followed=tuple(followed),
        chains="" if recoverer is None else recoverer.chains.feedback,
        unknown=loop.self_check.unknown,
        is_stuck=loop.self_check.is_stuck,
        is_running=is_running,
        example=example,
    )
