"""Where rows go, and what an alert leads to."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..alerts import Level
from .problem import Problem
from .setup import Setup

__all__ = ["of_consequences"]


def of_consequences(setup: Setup) -> Iterator[Problem]:
    """Sinks, actions, and ranks."""
    if not setup.has_sinks:
        yield Problem(
            Level.INFO,
            "no_sinks",
            "guard(log_dir=)",
            "Rows of diagnostics are written nowhere; alerts go to the log alone.",
            'log_dir="runs/1", or sinks=[...].',
        )
    on_gpu = setup.model is not None and any(p.is_cuda for p in setup.model.parameters())
    if setup.judge_in_loss and on_gpu:
        yield Problem(
            Level.INFO,
            "judge_in_loss",
            "guard(judge_in_loss=)",
            "judge_in_loss=True makes the host wait for the GPU once per step.",
            "nothing, where an ERROR should act in its own step; judge_in_loss=False decides two "
            "steps later and waits for nothing.",
        )
    if setup.is_distributed and not setup.joins_ranks:
        yield Problem(
            Level.WARN,
            "ranks",
            "guard(process_group=)",
            "Several ranks train, but each weighs its own samples alone, and alerts of one rank "
            "are not those of the others.",
            "process_group=torch.distributed.group.WORLD.",
        )
    if setup.action == "rollback":
        yield from _rollback(setup, on_gpu)


def _rollback(setup: Setup, on_gpu: bool) -> Iterator[Problem]:
    missing = [name for name in ("model", "optimizer") if getattr(setup.trainer, name) is None]
    if missing:
        yield Problem(
            Level.ERROR,
            "rollback_incomplete",
            "g.attach",
            f'action="rollback" cannot take back what it does not know: {" and ".join(missing)}.',
            f"g.attach({', '.join(f'{name}=...' for name in missing)}) before the first step.",
        )
    if setup.trainer.buffer is None and setup.has_sampler:
        yield Problem(
            Level.WARN,
            "rollback_incomplete",
            "g.attach",
            "No replay buffer is attached: chains of the lost run would go on after a rollback.",
            "g.attach(buffer=...); nothing, if every chain starts afresh.",
        )
    unknown = [
        name for name in ("scheduler", "ema", "generators") if not getattr(setup.trainer, name)
    ]
    if unknown:
        yield Problem(
            Level.INFO,
            "rollback_incomplete",
            "g.attach",
            f"Not attached: {', '.join(unknown)}. What the trainer has of these would not be taken "
            "back; PyTorch's global generators always are.",
            f"g.attach({', '.join(f'{name}=...' for name in unknown)}), those that there are.",
        )
    if on_gpu and torch.backends.cudnn.benchmark:
        yield Problem(
            Level.INFO,
            "nondeterministic",
            "torch.backends.cudnn.benchmark",
            "cuDNN picks its algorithms by measurement: a rollback restores every bit, but the "
            "steps after it are not those of a second run.",
            "nothing, unless runs are to be compared bit by bit.",
        )
