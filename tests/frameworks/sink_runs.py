"""A guarded loop that blows up and loses energies, and what its rows and alerts were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import ebmguard
from ebmguard.sinks import read_jsonl

__all__ = ["STEPS", "assert_same", "feed", "lines"]

STEPS = 60


def feed(sinks: list[Any], folder: Path, *, on_step: Any = lambda step: None) -> ebmguard.Guard:
    """Sixty losses: a gap of 100 from step 50 on, a NaN at 57, an infinity at 58.

    Args:
        sinks: under test.
        folder: gets the same as JSON lines.
        on_step: what the trainer itself does at each step.
    """
    jsonl = ebmguard.sinks.JsonlSink(folder)
    g = ebmguard.guard(None, None, beta_star=0.5, sinks=[*sinks, jsonl], flush_every=7)
    for step in range(STEPS):
        torch.manual_seed(step)
        f_pos, f_neg = torch.randn(32) + 100.0 * (step >= 50), torch.randn(32)
        if step >= 57:
            f_neg[3] = {57: math.nan, 58: math.inf}.get(step, 0.0)
        g.loss(f_pos, f_neg)
        on_step(step)
    g.close()
    return g


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_jsonl(folder / f"{name}.jsonl")


def assert_same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    """Steps and values of one tag, NaN and infinities included."""
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (step, one), (_, other) in zip(found, expected, strict=True):
        assert one == other or (math.isnan(one) and math.isnan(other)), (step, one, other)
