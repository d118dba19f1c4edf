"""overshoot, stale_chains, saturated and step_size on short real runs of an EBM in the plane."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from ebmguard import Alert, Level, guard
from ebmguard.samplers import ReplayBuffer, sgld
from tests.parts import Bowl, Energy

STEPS = 210  # five values of what comes once in 50 steps
SLOW_RULES = ("overshoot", "stale_chains", "saturated", "step_size")


class Run(NamedTuple):
    alerts: list[Alert]
    rows: list[dict[str, float]]

    def fired(self) -> set[tuple[str, str, Level]]:
        return {(a.rule, a.tag, a.level) for a in self.alerts if a.rule in SLOW_RULES}


def train(
    *,
    steps: int = STEPS,
    sgld_steps: int = 10,
    step_size: float = 0.02,
    noise_std: float = 0.2,
    clamp: tuple[float, float] = (-3.0, 3.0),
    buffer_size: int = 1000,
    reinit_rate: float = 0.05,
    height: float | None = None,
    beta_star: float = 0.0,
) -> Run:
    """Fit a mixture of two Gaussians with a small network, or with a parabola of a given height."""
    torch.manual_seed(0)
    f: torch.nn.Module = Energy()
    if height is not None:
        f = Bowl(torch.float32)
        torch.nn.init.constant_(f.height, height)
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(1)
    buffer = ReplayBuffer(
        buffer_size, (2,), reinit_rate=reinit_rate, generator=rng, low=-3.0, high=3.0
    )

    def sample_q(f: torch.nn.Module) -> torch.Tensor:
        x0, index = buffer.sample(64)
        x = sgld(
            f,
            x0,
            steps=sgld_steps,
            step_size=step_size,
            noise_std=noise_std,
            clamp=clamp,
            generator=rng,
        )
        buffer.write(index, x)
        return x

    alerts: list[Alert] = []
    rows: list[dict[str, float]] = []
    # The rules see the steps as they are, and what becomes of them.
    told: dict[str, Any] = {"substeps": 1, "action": "warn", "on_alert": alerts.append}
    loss_fn, sampler = guard(None, sample_q, beta_star=beta_star, **told)
    loss_fn.guard.attach(
        model=f,
        optimizer=optimizer,
        buffer=buffer,
        step_size=step_size,
        noise_std=noise_std,
        clamp=clamp,
    )
    for _ in range(steps):
        side = torch.randint(0, 2, (64, 1), generator=rng) * 2 - 1
        data = side + 0.3 * torch.randn(64, 2, generator=rng)
        loss = loss_fn(f(data), f(sampler(f)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append(dict(loss_fn.guard.last))
    loss_fn.guard.close()
    return Run(alerts, rows)


# Each step goes three times as far as the bottom of the parabola.
UNSTABLE: dict[str, Any] = {
    "height": 100.0,
    "step_size": 0.03,
    "sgld_steps": 3,
    "reinit_rate": 1.0,
    "clamp": (-100.0, 100.0),
}
HEALTHY: dict[str, dict[str, Any]] = {
    "persistent": {},
    # More drift than the noise belongs to, as JEM has.
    "decoupled noise": {"step_size": 0.1, "noise_std": 0.05, "reinit_rate": 1.0},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_run_that_works_is_quiet(name):
    run = train(**HEALTHY[name])
    assert run.fired() == set()
    known = run.rows[-1].keys()
    assert {"energy_overlap", "buffer/age", "sampler/clamped", "sampler/drift_to_noise"} <= known
    assert "sampler/acceptance" in run.rows[200]


def test_a_sampler_that_all_but_maximises_f_overshoots():
    run = train(step_size=5.0, noise_std=0.01, steps=120)
    (alert,) = [a for a in run.alerts if a.rule == "overshoot"]
    assert (alert.tag, alert.level) == ("energy_overlap", Level.WARN)
    assert alert.remedies == ("fewer SGLD steps", "a lower beta_star, below 0")


def test_a_buffer_smaller_than_the_draw_repeats_its_chains():
    run = train(buffer_size=16, steps=60)
    assert run.fired() == {("stale_chains", "buffer/duplicates", Level.WARN)}


def test_chains_that_never_start_afresh_are_spoken_of_when_they_are_old():
    run = train(buffer_size=64, reinit_rate=0.0, sgld_steps=1, steps=420)
    assert run.fired() == {("stale_chains", "buffer/age", Level.INFO)}


def test_samples_that_are_pressed_against_the_clamp_are_saturated():
    run = train(clamp=(-0.005, 0.005), steps=60)
    assert run.fired() == {("saturated", "sampler/clamped", Level.WARN)}


@pytest.mark.parametrize(
    ("settings", "tag"),
    [
        ({"step_size": 1e-4, "steps": 60}, "sampler/drift_to_noise"),
        (UNSTABLE, "sampler/acceptance"),
    ],
    ids=["random walk", "too long"],
)
def test_steps_of_the_wrong_size_are_spoken_of_once(settings, tag):
    run = train(**settings)
    found = [(a.tag, a.level) for a in run.alerts if a.rule == "step_size"]
    assert found == [(tag, Level.INFO)]
