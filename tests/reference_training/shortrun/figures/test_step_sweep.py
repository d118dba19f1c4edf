from __future__ import annotations

import math

import pytest
import torch

from ebmguard.reference_training.shortrun.figures import step_sweep as module
from ebmguard.reference_training.shortrun.figures.step_sweep import even_stops, stops_of, sweep
from tests.reference_training.shortrun.parts import Quadratic, tiny_run


def test_the_stops_of_the_author_response():
    assert even_stops([100, 50]) == tuple(range(0, 201, 20))
    assert stops_of([100]) == tuple(range(0, 201, 20))
    # A model trained with 50 steps is looked at after 50 too.
    assert stops_of([100, 50]) == (0, 20, 40, 50, 60, 80, 100, 120, 140, 160, 180, 200)
    assert stops_of([10]) == tuple(range(0, 21, 2))
    assert stops_of([100, 10]) == (0, 10, *range(20, 201, 20))


@pytest.mark.parametrize("trained", [[1], [2], [3], [7, 100], [5, 10, 25, 50, 75, 100]])
def test_stops_ascend_and_hold_every_k1_and_twice_it(trained):
    stops = stops_of(trained)
    assert all(isinstance(stop, int) for stop in stops)
    assert list(stops) == sorted(set(stops))
    assert (stops[0], stops[-1]) == (0, 2 * max(trained))
    assert {stop for steps in trained for stop in (steps, 2 * steps)} <= set(stops)
    assert set(even_stops(trained)) <= set(stops)


def test_chains_on_a_quadratic_have_a_closed_form():
    """x <- x - s a (x - m) without noise: x_k = m + (1 - s a)^k (x_0 - m)."""
    strength, mean, step_size = 0.05, 0.3, 0.5
    # f of the sampler is (1 - β) f, and β* is β times 2 s / σ².
    run = tiny_run(
        network=Quadratic(strength, mean),
        step_size=step_size,
        noise_std=1e-7,
        beta_star=0.2 * 2 * step_size / 1e-14,
    )
    stops = (0, 2, 5, 30)
    found = sweep(run, stops, count=40, seed=8)
    z = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(8)).double() * 2 - 1
    for steps in stops:
        shrink = (1 - step_size * 0.8 * strength) ** steps
        x = mean + shrink * (z - mean)
        chains = found.at(steps)
        squares = (x - mean).square().flatten(1).sum(dim=1)
        assert torch.allclose(chains.each["f"], -strength / 2 * squares, atol=1e-5)
        assert torch.allclose(chains.each["slope"], strength * squares.sqrt(), atol=1e-5)
        assert torch.allclose(
            chains.each["contrast"], x.flatten(1).std(dim=1, correction=0), atol=1e-5
        )
        shown = found.images[:, stops.index(steps)]
        assert torch.allclose(shown.double(), x[:3], atol=1e-5)
    f_data = found.data.mean("f")
    assert found.gap(5) == pytest.approx(f_data - found.at(5).mean("f"), rel=1e-12)


def test_the_noise_of_chains_adds_up_over_stops():
    """On a quadratic Var x_k = r^2k / 3 + σ² (1 - r^2k) / (1 - r²) with r = 1 - s a."""
    run = tiny_run(network=Quadratic(0.1), noise_std=0.2, beta_star=0.0)
    found = sweep(run, (0, 3, 12), count=300, seed=0)
    for steps in found.stops:
        kept = 0.9 ** (2 * steps)
        variance = kept / 3 + 0.2**2 * (1 - kept) / (1 - 0.9**2)
        size = math.sqrt(2 * -found.at(steps).mean("f") / 0.1 / 64)
        assert size == pytest.approx(math.sqrt(variance), rel=0.02)


def test_the_data_have_the_noise_of_training_and_the_references_have_none():
    run = tiny_run(data_noise=0.5)
    found = sweep(run, (0,), count=2, seed=0)
    assert found.clean.mean("distance") == 0.0
    assert found.clean.mean("beyond") == found.held_out.mean("beyond") == 0.0
    # Half of the noise at a black or white entry leaves the cube, on the mean by σ / sqrt(2 pi).
    ends = found.clean.mean("ends")
    assert found.data.mean("beyond") > 0.4 * ends
    assert found.data.mean("excess") > 0.9 * ends * 0.5 / math.sqrt(2 * math.pi)
    assert found.held_out.mean("distance") > 0
    assert found.over_data(0, "contrast") == pytest.approx(
        found.at(0).mean("contrast") / found.data.mean("contrast")
    )
    assert found.over_data(0, "distance") == pytest.approx(
        found.at(0).mean("distance") / found.held_out.mean("distance")
    )
    assert math.isnan(found.over_data(0, "colour"))  # of grey images, 0 over 0


def test_one_seed_gives_runs_the_same_starts_and_noise(monkeypatch):
    stops = (0, 3)
    first, other = (
        sweep(tiny_run(name, network=Quadratic(0.1), noise_std=0.3), stops, count=5, seed=1)
        for name in ("a", "b")
    )
    assert torch.equal(first.images, other.images)
    fresh = sweep(tiny_run(network=Quadratic(0.1), noise_std=0.3), stops, count=5, seed=2)
    assert not torch.equal(first.images[:, 0], fresh.images[:, 0])
    # In parts, all chains go on.
    monkeypatch.setattr(module, "BATCH", 2)
    parts = sweep(tiny_run(network=Quadratic(0.1), noise_std=1e-7), stops, count=5, seed=1)
    assert len(parts.at(3).each["f"]) == 5
    expected = 0.9**6 * parts.at(0).each["f"]
    assert torch.allclose(parts.at(3).each["f"], expected, rtol=1e-4)


def test_chains_that_are_lost_have_no_numbers():
    run = tiny_run(network=Quadratic(-1e30))
    found = sweep(run, (0, 1, 3), count=2, seed=0)
    assert math.isfinite(found.at(0).mean("contrast"))
    assert math.isnan(found.at(3).mean("contrast"))
    assert math.isnan(found.at(3).mean("beyond"))
    assert math.isnan(found.at(3).mean("distance"))
