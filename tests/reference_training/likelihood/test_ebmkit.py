"""Against another implementation: ebmkit's, whose energies have the opposite sign."""

from __future__ import annotations

from typing import Any

import ebm
import pytest
import torch
from ebm.samplers.base import Sampler

from ebmguard.reference_training.likelihood import Path, Schedule, forward, pilot, reverse
from tests.reference_training.likelihood.parts import WIDE, modes, rng

BETAS = (0.0, 0.1, 0.35, 0.5, 0.9, 1.0)


class Turn(Sampler):
    """Moves that no random number decides: with them both libraries walk the same chains."""

    def step(self, energy, x):
        return turned(x)


def turned(x):
    return x.flip(1) * torch.tensor([0.9, -1.1], dtype=x.dtype)


def test_the_same_walks_have_the_same_weights():
    known = modes()
    base = torch.distributions.Independent(
        torch.distributions.Normal(torch.zeros(2).double(), 2), 1
    )
    betas = torch.tensor(BETAS, dtype=WIDE)
    options: dict[str, Any] = {"base": base, "schedule": betas, "sampler": Turn(steps=1)}

    class Seeded:
        log_prob = base.log_prob

        def sample(self, count, generator=None):
            torch.manual_seed(0)
            return base.sample((count,))

    # Theirs does not move at β = 1 on the way back.
    path = Path(known.path.f, Seeded(), transition=lambda x, beta, rng: turned(x))
    still = Path(known.path.f, Seeded(), lambda x, beta, rng: x if beta == 1 else turned(x))
    torch.manual_seed(0)
    theirs = ebm.ais_log_z(lambda x: -known.path.f(x), (2,), n_chains=50, **options)
    ours = forward(path, Schedule(BETAS), chains=50)
    torch.testing.assert_close(ours.log_weights, theirs.log_weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.samples, theirs.samples, rtol=1e-12, atol=1e-12)
    assert (ours.log_z, ours.ess) == pytest.approx((theirs.log_z, theirs.ess), rel=1e-9)
    x = known.samples(50)
    theirs = ebm.reverse_ais_log_z(lambda x: -known.path.f(x), x, **options)
    ours = reverse(still, Schedule(BETAS), x)
    torch.testing.assert_close(ours.log_weights, theirs.log_weights, rtol=1e-12, atol=1e-12)
    assert (ours.log_z, ours.ess) == pytest.approx((theirs.log_z, theirs.ess), rel=1e-9)


def test_both_find_the_same_log_z():
    known = modes()
    base = torch.distributions.Independent(
        torch.distributions.Normal(torch.zeros(2).double(), 2), 1
    )
    schedule = pilot(known.path, chains=100, temperatures=150, generator=rng(1))
    options: dict[str, Any] = {"base": base, "schedule": torch.tensor(schedule.betas, dtype=WIDE)}
    x = known.samples(300)
    theirs = (
        ebm.ais_log_z(lambda x: -known.path.f(x), (2,), n_chains=300, **options),
        ebm.reverse_ais_log_z(lambda x: -known.path.f(x), x, **options),
    )
    ours = (
        forward(known.path, schedule, chains=300, generator=rng(2)),
        reverse(known.path, schedule, x, generator=rng(3)),
    )
    for one, other in zip(ours, theirs, strict=True):
        error = (one.standard_error**2 + other.stderr**2) ** 0.5
        assert one.log_z == pytest.approx(other.log_z, abs=4 * error)
