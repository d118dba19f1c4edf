"""Faults on purpose in a guarded loop.

Each is noticed within one flush, by the rule that is its own, and a rollback brings the run back.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import Guard, Level, Recovery, guard
from ebmguard.samplers import ReplayBuffer, sgld
from tests.faults.injector import FaultInjector

BATCH = 32
AT = 40
FLUSH = 50
UPDATES = AT + FLUSH + 40


@dataclass
class World:
    """One run and what is in it."""

    f: nn.Module
    buffer: ReplayBuffer
    optimizer: torch.optim.Adam
    guard: Guard
    faults: FaultInjector

    @property
    def errors(self) -> list[tuple[str, int]]:
        return [(a.rule, a.step) for a in self.guard.alerts if a.level is Level.ERROR]

    def is_finite(self) -> bool:
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        parts = *self.f.parameters(), self.buffer.samples, *moments
        return all(bool(torch.isfinite(part).all()) for part in parts)


def run(
    arm: Any,
    *,
    beta_star: float,
    seed: int = 0,
    updates: int = UPDATES,
    lr: float = 1e-3,
    **options: Any,
) -> World:
    """Four Gaussians in the plane, persistent chains, Adam; the faults' steps are the guard's."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU()
    f = nn.Sequential(*hidden, nn.Linear(32, 1), nn.Flatten(0))
    buffer = ReplayBuffer(64, (2,), reinit_rate=0.05, generator=generator, low=-2.0, high=2.0)
    optimizer = torch.optim.Adam(f.parameters(), lr=lr)

    def draw(f: nn.Module) -> Tensor:
        start, rows = buffer.sample(BATCH)
        end = sgld(f, start, steps=10, step_size=0.1, noise_std=0.14, generator=generator)
        buffer.write(rows, end)
        return end

    def data() -> Tensor:
        angle = torch.randint(4, (BATCH,), generator=generator) * math.pi / 2
        centre = torch.stack((angle.cos(), angle.sin()), 1)
        return centre + 0.1 * torch.randn(BATCH, 2, generator=generator)

    faults = FaultInjector(step=lambda: g.step)
    g = guard(None, faults.sampler(draw), beta_star=beta_star, output_scale=10.0, **options)
    world = World(f, buffer, optimizer, g, faults)
    arm(faults, world)
    g.attach(model=f, optimizer=optimizer, buffer=buffer, generators=[generator])
    with faults:
        for _ in range(updates):
            samples = g.sampler(f)
            loss = g.loss_fn(f(data()), f(samples))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return world


FAULTS: dict[str, tuple[Any, str, Level]] = {
    "nan_sample": (lambda x, w: x.nan_sample(AT), "nonfinite", Level.ERROR),
    "frozen_sampler": (lambda x, w: x.frozen_sampler(AT), "stale_chains", Level.WARN),
    "energy_spike": (lambda x, w: x.energy_spike(AT, w.f), "energy_blowup", Level.ERROR),
    "nan in a row": (lambda x, w: x.corrupt_buffer(AT, w.buffer), "nonfinite", Level.ERROR),
    "a huge row": (
        lambda x, w: x.corrupt_buffer(AT, w.buffer, value=1e6),
        "energy_blowup",
        Level.ERROR,
    ),
    "exploding_lr": (
        lambda x, w: x.exploding_lr(AT, w.optimizer, steps=3),
        "energy_blowup",
        Level.ERROR,
    ),
}


@pytest.mark.parametrize("beta_star", [0.0, 2.0])
def test_without_a_fault_there_is_no_error(beta_star):
    world = run(lambda x, w: None, beta_star=beta_star, updates=AT + FLUSH)
    assert world.errors == []
    assert "stale_chains" not in {alert.rule for alert in world.guard.alerts}


@pytest.mark.parametrize(("name", "beta_star"), [*zip(FAULTS, itertools.cycle((0.0, 0.5)))])
def test_is_noticed_within_one_flush_by_its_own_rule_and_rolled_back(name, beta_star):
    arm, rule, level = FAULTS[name]
    recovery = Recovery(every=10, certify_after=20, budget=3)
    world = run(arm, beta_star=beta_star, action="rollback", recovery=recovery)
    assert [record.step for record in world.faults.records] == [AT]
    alerts, step = world.guard.alerts, world.guard.step
    # No other rule was as loud before it.
    first = next(a for a in alerts if a.step >= AT and a.level >= level)
    assert (first.rule, first.level) == (rule, level)
    assert first.step - AT < FLUSH
    assert world.is_finite()
    if level is Level.ERROR:
        rollback = world.guard.rollbacks[0]
        assert rollback.alert is first
        assert rollback.restored_step <= AT < step < UPDATES
    # The fault does not come again, and neither does its alarm.
    last = world.guard.rollbacks[-1].alert if world.guard.rollbacks else None
    assert all(a.step < step - 20 or a is last for a in alerts if a.level is Level.ERROR)
