"""Long chains: on quadratic f they are Gaussian processes in closed form, or leave for infinity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.figures.long_chains import (
    LongRun,
    chain_count,
    last_stop,
    long_run,
    spread,
    stops_of,
)

from ..parts import Quadratic, tiny_run

STOPS = (0, 3, 6, 15, 30, 60, 150, 300)
ENTRIES = 64


def quadratic(
    strength: float, mean: float = 0.0, *, count: int = 32, seed: int = 0, **settings: Any
) -> LongRun:
    run = tiny_run(network=Quadratic(strength, mean), **settings)
    return long_run(run, STOPS, count=count, seed=seed)


def test_schedule() -> None:
    assert stops_of(3, 300) == STOPS
    assert stops_of(100, 10_000) == (0, 100, 200, 500, 1000, 2000, 5000, 10_000)
    # Beside a run of more steps: the common end is no multiple of its own kind.
    assert stops_of(20, 10_000) == (0, 20, 40, 100, 200, 400, 1000, 2000, 4000, 10_000)
    assert stops_of(7, 7) == (0, 7)
    assert last_stop([20, 100, 50]) == 10_000


@pytest.mark.parametrize("beta_star", [0.0, 400.0])
def test_mean_and_variance_follow_the_recursion(beta_star: float) -> None:
    a, m, sigma = 0.02, 0.3, 0.05
    own = quadratic(a, m, noise_std=sigma, beta_star=beta_star)
    # o = 2 / sigma**2 = 800: at 400 the drift is halved.
    decay = 1 - a * (1 - beta_star / 800)
    noise, data = own.chains
    for stop in STOPS:
        power = decay**stop
        variance = sigma**2 * (1 - power**2) / (1 - decay**2)
        # E f = -a/2 sum of (x - m)**2, from U(-1, 1) of mean 0 and variance 1/3.
        from_noise = power**2 / 3 + variance + (power * m) ** 2
        assert noise.mean("f", stop) == pytest.approx(-a / 2 * ENTRIES * from_noise, rel=0.06)
        # |grad f| = a |x - m| = sqrt(-2 a f), of each chain.
        slope = (-2 * a * noise.values("f", stop)).sqrt()
        torch.testing.assert_close(noise.values("slope", stop), slope, rtol=1e-4, atol=1e-9)
        # From data the start is known: f at step 0 is -a/2 |x0 - m|**2.
        away = -2 * data.mean("f", 0) / a / ENTRIES
        moved = data.values("moved", stop).square().mean().item()
        assert moved == pytest.approx((1 - power) ** 2 * away + variance, rel=0.06)
    # Both have forgotten where they came from: one distribution.
    steady = -a / 2 * ENTRIES * sigma**2 / (1 - decay**2)
    if beta_star == 0:
        assert noise.mean("f", 300) == pytest.approx(steady, rel=0.06)
        assert data.mean("f", 300) == pytest.approx(steady, rel=0.06)


def test_pull_is_drift_over_noise() -> None:
    # o = 2 * 0.5 / 0.0025 = 400, of which beta_star = 100 leaves three quarters.
    own = quadratic(0.02, noise_std=0.05, beta_star=100.0, step_size=0.5, count=4)
    assert own.pull(3.0) == pytest.approx(3.0 * 0.5 * 0.75 / (0.05 * 8))


@pytest.mark.parametrize(("growth", "between"), [(2.0, (60, 150)), (10.0, (30, 60))])
def test_divergence_is_seen_between_the_right_stops(
    growth: float, between: tuple[int, int]
) -> None:
    # |x| <= 1 grows by this factor a step; float32 ends at 2**128 = 10**38.5.
    own = quadratic(1 - growth, beta_star=0.0)
    for chains in own.chains:
        assert chains.lost() == between
        assert chains.finite(between[0]).all()
        assert not chains.finite(between[1]).any()
        assert math.isnan(chains.mean("contrast", 300))
        assert math.isnan(own.above("contrast", chains, 300))
        sizes = np.array(chains.largest)
        finite = np.array([stop <= between[0] for stop in STOPS])
        assert np.isfinite(sizes[finite]).all()
        assert not np.isfinite(sizes[~finite]).any()
        expected = sizes[0] * growth ** between[0]
        assert sizes[STOPS.index(between[0])] == pytest.approx(expected, rel=0.1)


def test_growth_that_stays_finite_is_not_lost() -> None:
    own = quadratic(-0.1, beta_star=0.0)
    for chains in own.chains:
        assert chains.lost() is None
        assert chains.largest[-1] == pytest.approx(chains.largest[0] * 1.1**300, rel=0.2)
        assert own.above("contrast", chains, 300) == 1


def test_some_chains_are_lost_and_the_others_are_measured() -> None:
    class Cliff(torch.nn.Module):
        """Flat, but for images of positive mean: those are thrown to infinity."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.flatten(1).mean(dim=1)
            return torch.where(mean > 0, 1e30 * mean.square(), 0 * mean)

    run = tiny_run(network=Cliff(), noise_std=1e-6, beta_star=0.0)
    own = long_run(run, STOPS, count=32, seed=0)
    chains = own.chains[0]
    positive = int((run.starts(32, torch.Generator().manual_seed(0)).mean(dim=(1, 2, 3)) > 0).sum())
    assert 0 < positive < 32
    assert int((~chains.finite(300)).sum()) == positive
    assert len(chains.values("f", 300)) == 32 - positive
    assert chains.mean("moved", 300) < 1e-4


def test_data_starts_are_held_out_images_with_the_noise_of_training() -> None:
    run = tiny_run(network=Quadratic(0.0), noise_std=1e-6, data_noise=1e-4)
    chains = long_run(run, STOPS, count=32, seed=3).chains[1]
    test = run.data.scale(run.data.test_x)
    assert chains.images.shape == (3, len(STOPS), 1, 8, 8)
    for image in chains.images[:, 0]:
        apart = (test - image).square().mean(dim=(1, 2, 3)).sqrt()
        assert apart.min() == pytest.approx(1e-4, rel=0.3)
    # A flat f moves nothing: the noise alone, sqrt(300) times.
    assert chains.mean("moved", 300) == pytest.approx(1e-6 * math.sqrt(300), rel=0.1)
    assert chains.mean("moved", 0) == 0


def test_same_seed_same_starts_whatever_the_stops() -> None:
    run = tiny_run()
    one = long_run(run, (0, 3), count=4, seed=5)
    other = long_run(run, (0, 2, 3), count=4, seed=5)
    again = long_run(run, (0, 3), count=4, seed=6)
    for a, b, c in zip(one.chains, other.chains, again.chains, strict=True):
        torch.testing.assert_close(a.images[:, 0], b.images[:, 0], rtol=0, atol=0)
        assert not torch.equal(a.images[:, 0], c.images[:, 0])


def test_shares_above_and_below_are_those_of_numpy() -> None:
    own = quadratic(0.01, noise_std=0.05)
    contrasts = own.data.each["contrast"].numpy()
    low, high = np.quantile(contrasts, [0.025, 0.975])
    assert own.quantiles("contrast") == pytest.approx((low, high))
    for chains in own.chains:
        for stop in STOPS:
            values = chains.values("contrast", stop).numpy()
            assert own.above("contrast", chains, stop) == pytest.approx((values > high).mean())
            assert own.below("contrast", chains, stop) == pytest.approx((values < low).mean())
            ratio = values.mean() / contrasts.mean()
            assert own.of_data("contrast", chains, stop) == pytest.approx(ratio)
            away = own.held_out.each["distance"].mean().item()
            ratio = chains.values("distance", stop).mean().item() / away
            assert own.of_data("distance", chains, stop) == pytest.approx(ratio)
            f = own.data.each["f"].numpy()
            shift = (chains.values("f", stop).mean().item() - f.mean()) / f.std()
            assert own.shift(chains, stop) == pytest.approx(shift)


def test_spread_is_that_of_numpy_over_what_is_finite() -> None:
    images = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = np.sqrt(images.numpy().reshape(6, -1).var(axis=0, ddof=1).mean())
    assert spread(images) == pytest.approx(expected)
    lost = torch.cat([images, torch.full((1, 1, 4, 4), torch.inf), 0 * images[:1] + torch.nan])
    assert spread(lost) == pytest.approx(expected)
    # Of the two that are left there is one; of one image there is no variance.
    assert math.isnan(spread(lost[5:]))


def test_variety_goes_with_the_recursion() -> None:
    a, sigma = 0.02, 0.05
    own = quadratic(a, noise_std=sigma, beta_star=0.0)
    decay = 1 - a
    for chains, first in zip(own.chains, (1 / 3, own.chains[1].spread[0] ** 2), strict=True):
        for stop in STOPS:
            power = decay**stop
            variance = power**2 * first + sigma**2 * (1 - power**2) / (1 - decay**2)
            share = math.sqrt(variance) / own.data_spread
            assert own.variety(chains, stop) == pytest.approx(share, rel=0.06)


def test_what_has_no_spread_has_no_shift() -> None:
    own = quadratic(0.0, count=4)
    assert math.isnan(own.shift(own.chains[0], 300))


def test_chain_count() -> None:
    run = tiny_run()
    assert chain_count(run, None) == 32
    assert chain_count(run, 5) == 5
    with pytest.raises(ConfigError, match=r"33 chains were asked for.*has 32 test images"):
        chain_count(run, 33)
    assert chain_count(tiny_run(test_images=100), None) == 64
