"""Guarded loops that a sink is tried in, and what they should have left behind."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ebmguard
from ebmguard.sinks import read_jsonl
from tests.parts import Energy, difference, gradients, unit_langevin
from tests.runs import Run, Trial

__all__ = ["OWN", "STEPS", "assert_only_watches", "assert_same", "feed", "lines"]

STEPS = 60
OWN = "acc@1"
"""What the trainer itself logs by ``g.log``."""


def trained(beta_star: float | None = None, sinks: tuple[Any, ...] = ()) -> Run:
    """Sixty steps of a small trainer; None leaves the guard out."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    f = Energy()
    run = Run(f, torch.optim.Adam(f.parameters(), lr=0.01))

    def sample_q(f):
        return unit_langevin(f, torch.randn(8, 2), 3, 0.5)

    trial = Trial(beta_star, STEPS, attach=True)
    settings = {"output_scale": 8.0, "sinks": sinks, "flush_every": 7}
    run.loss_fn, run.sampler = trial.around(run, difference, sample_q, settings)
    for _ in range(STEPS):
        run.step(torch.randn(8, 2))
    run.end()
    assert all(g.step == STEPS for g in run.guards)
    return run


def assert_only_watches(*sinks: Any) -> None:
    """At β* = 0 a run with these sinks is the unguarded one bit for bit, all random numbers too.

    At β* = 2 its gradients are the closed form.
    """
    assert trained(0.0, sinks).equals(trained())
    for call in trained(2.0, sinks).calls:
        to_pos, to_neg = gradients(call.f_pos, call.f_neg, 2.0)
        torch.testing.assert_close(call.to_pos, to_pos, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(call.to_neg, to_neg, rtol=1e-5, atol=1e-7)


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
        g.log({OWN: step / 8})
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
