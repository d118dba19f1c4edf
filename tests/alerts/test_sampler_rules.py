"""overshoot, stale_chains, saturated and step_size on short real runs of an EBM in the plane."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard import Alert, Level, guard
from ebmguard.samplers import ReplayBuffer, sgld
from tests.parts import Bowl, Energy

WARN, INFO = Level.WARN, Level.INFO


def train(
    *,
    steps: int = 60,
    sgld_steps: int = 10,
    step_size: float = 0.02,
    noise_std: float = 0.2,
    clamp: tuple[float, float] = (-3.0, 3.0),
    buffer_size: int = 1000,
    reinit_rate: float = 0.05,
    height: float | None = None,
) -> tuple[list[Alert], dict[str, float]]:
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
    sizes: Any = {"step_size": step_size, "noise_std": noise_std, "clamp": clamp}

    def sample_q(f: torch.nn.Module) -> torch.Tensor:
        x0, index = buffer.sample(64)
        x = sgld(f, x0, steps=sgld_steps, generator=rng, **sizes)
        buffer.write(index, x)
        return x

    alerts: list[Alert] = []
    # The rules see the steps as they are, and what becomes of them.
    told: dict[str, Any] = {"substeps": 1, "action": "warn", "on_alert": alerts.append}
    loss_fn, sampler = g = guard(None, sample_q, beta_star=0.0, **told)
    g.attach(model=f, optimizer=optimizer, buffer=buffer, **sizes)
    row: dict[str, float] = {}
    for _ in range(steps):
        side = torch.randint(0, 2, (64, 1), generator=rng) * 2 - 1
        data = side + 0.3 * torch.randn(64, 2, generator=rng)
        loss = loss_fn(f(data), f(sampler(f)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        row |= g.last
    g.close()
    return alerts, row


@pytest.mark.parametrize(
    "settings",
    [
        {},
        # More drift than the noise belongs to, as JEM has.
        {"step_size": 0.1, "noise_std": 0.05, "reinit_rate": 1.0},
    ],
)
def test_a_run_that_works_is_quiet(settings):
    alerts, row = train(steps=210, **settings)  # five values of what comes once in 50 steps
    assert not alerts
    known = {"energy_overlap", "buffer/age", "sampler/clamped", "sampler/drift_to_noise"}
    assert known | {"sampler/acceptance"} <= row.keys()


@pytest.mark.parametrize(
    ("fired", "settings"),
    [
        # A sampler that all but maximises f.
        (
            ("overshoot", "energy_overlap", WARN),
            {"step_size": 5.0, "noise_std": 0.01, "steps": 120},
        ),
        # A buffer smaller than the draw.
        (("stale_chains", "buffer/duplicates", WARN), {"buffer_size": 16}),
        # Chains that never start afresh, once they are old.
        (
            ("stale_chains", "buffer/age", INFO),
            {"buffer_size": 64, "reinit_rate": 0.0, "sgld_steps": 1, "steps": 420},
        ),
        # Samples that are pressed against the clamp.
        (("saturated", "sampler/clamped", WARN), {"clamp": (-0.005, 0.005)}),
        # A random walk.
        (("step_size", "sampler/drift_to_noise", INFO), {"step_size": 1e-4}),
        # Each step goes three times as far as the bottom of the parabola.
        (
            ("step_size", "sampler/acceptance", INFO),
            {
                "height": 100.0,
                "step_size": 0.03,
                "sgld_steps": 3,
                "steps": 210,
                "reinit_rate": 1.0,
                "clamp": (-100.0, 100.0),
            },
        ),
    ],
)
def test_what_a_sampler_does_wrong_is_spoken_of_once(fired, settings):
    alerts, _ = train(**settings)
    assert [(a.rule, a.tag, a.level) for a in alerts].count(fired) == 1
