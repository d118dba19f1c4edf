"""What is measured of a member, against loops, numpy and closed forms."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.evaluate import (
    Evaluator,
)
from ebmguard.reference_training.toy.grid import bandwidth
from ebmguard.reference_training.toy.members import Members
from ebmguard.reference_training.toy.network import EnsembleMLP
from ebmguard.reference_training.toy.sampler import Draws
from ebmguard.reference_training.toy.scenario import SCENARIOS
from tests.reference_training.parts import CPU, rng, small_evaluations


def evaluator_of(
    scenario="gmm-default", betas=("0.5",), variants=("default",), seeds=(0,), **other
):
    settings = dataclasses.replace(SCENARIOS[scenario], **other)
    return Evaluator(settings, Members.of(betas, variants, seeds), CPU)


@pytest.mark.parametrize("scenario", ["gmm-default", "mixture1d-default"])
def test_log_density_is_that_of_each_member_in_float64(scenario):
    evaluator = evaluator_of(scenario, betas=("0", "0.5"))
    distribution = DISTRIBUTIONS[evaluator.settings.data]
    network = EnsembleMLP([0, 1], distribution.dim)
    axis = np.linspace(-1.6, 1.6, 200)
    x, y = np.meshgrid(axis, axis)
    points = axis[:, None] if distribution.dim == 1 else np.stack([x.ravel(), y.ravel()], -1)
    found = evaluator.log_density(network)
    assert found.dtype == torch.float64
    assert found.shape == (2, 200**distribution.dim)
    assert not found.requires_grad
    for member in range(2):
        value = points
        for i, weight in enumerate(network.weights):
            value = value @ weight[member].detach().double().numpy()
            if i < len(network.biases):
                value = value + network.biases[i][member].detach().double().numpy()
                value = np.maximum(value, 0.05 * value)
        expected = 2 * 1.0 / evaluator.settings.noise_std**2 * value[:, 0]
        # float32 has seven digits, times the output scale of 200.
        np.testing.assert_allclose(found[member], expected, rtol=0, atol=2e-4)
    exact = evaluator.log_density(network.double())[1]
    np.testing.assert_allclose(exact, expected, rtol=1e-12)


def ring_density(x, y):
    """Of the sampler, with 1/r in place of the picture's 1/R."""
    r = np.hypot(x, y)
    return sum(stats.norm(k, 0.15).pdf(r) for k in (1, 2, 3, 4)) / 4 / (2 * np.pi * r)


def gmm_densities(x, y):
    angles = np.pi * np.arange(8) / 4
    return [
        (k + 1) / 36 * stats.norm(np.cos(a), 0.15).pdf(x) * stats.norm(np.sin(a), 0.15).pdf(y)
        for k, a in enumerate(angles)
    ]


@pytest.mark.parametrize("data", ["gmm", "circles"])
def test_metrics_are_sums_over_the_published_grid(data):
    """Again in numpy: for a sharp member, a flat one, one of its own shape and two lost ones."""
    evaluator = evaluator_of(f"{data}-default", seeds=(0, 1, 2, 3, 4))
    axis = np.linspace(*({"gmm": (-1.6, 1.6), "circles": (-4.6, 4.6)}[data]), 200)
    x, y = np.meshgrid(axis, axis)
    if data == "gmm":
        parts = np.stack(gmm_densities(x, y))
        density, modes = parts.sum(0), parts.argmax(0)
    else:
        density = ring_density(x, y)
        modes = np.abs(np.hypot(x, y)[..., None] - [1, 2, 3, 4]).argmin(-1)
    p = density / density.sum()
    log_p = np.log(density)
    learned = np.stack([3 * log_p + 7, 0.2 * log_p, log_p + x - y**2, log_p, log_p])
    learned[3:, 50, 50] = np.nan, np.inf
    rows = evaluator.measure(torch.from_numpy(learned).reshape(5, -1))
    for row, f in zip(rows[:3], learned[:3], strict=True):
        q = np.exp(f - f.max())
        q /= q.sum()
        assert row["kl"] == pytest.approx(np.sum(p * (np.log(p) - np.log(q))), rel=1e-9)
        assert row["tv"] == pytest.approx(np.abs(p - q).sum() / 2, rel=1e-9)
        masses = [abs((p - q)[modes == k].sum()) for k in range(modes.max() + 1)]
        # Rings meet where both are rare: which one a cell is counted to hardly matters.
        assert row["mode_mass_error"] == pytest.approx(sum(masses) / 2, rel=1e-3)
        slope, offset = np.polyfit(log_p.ravel(), f.ravel(), 1, w=np.sqrt(p).ravel())
        assert row["energy_scale"] == pytest.approx(slope, rel=1e-6)
        left = np.sum(p * (f - slope * log_p - offset) ** 2)
        around = np.sum(p * (f - np.sum(p * f)) ** 2)
        assert row["energy_r2"] == pytest.approx(1 - left / around, abs=1e-9)
    for lost in rows[3:]:
        assert set(lost) == {"kl", "tv", "mode_mass_error", "energy_scale", "energy_r2"}
        assert all(map(math.isnan, lost.values()))


def test_the_optimum_is_that_of_each_members_beta():
    """Up to a constant, with q the Gaussian that chains start from; unknown where β moves."""
    betas = ("0", "0.5", "-0.2", "0.1:0.9", "0.1+0.5", "0.3:0.3")
    evaluator = evaluator_of(
        "gmm-degenerate", betas, ("default", "true"), (3, 4, 5), init_mean=0.4, init_std=0.7
    )
    points = evaluator.grid.points.numpy()
    log_q = stats.multivariate_normal([0.4, 0.4], 0.49).logpdf(points)
    ratio = np.log(sum(gmm_densities(*points.T))) - log_q
    expected = {"0.5": 0.5, "-0.2": -0.2, "0.3:0.3": 0.3}
    who = evaluator.members.describe()
    known = [expected.get(member["beta"]) for member in who]
    # Members differ by a constant, and every other one learned half of what it should.
    share = np.where(np.arange(len(who)) % 2, 0.5, 1.0)
    learned = np.stack(
        [s * ratio / (b or 1.0) + i for i, (s, b) in enumerate(zip(share, known, strict=True))]
    )
    rows = evaluator.measure(torch.from_numpy(learned))
    for row, beta, s in zip(rows, known, share, strict=True):
        wanted = math.nan if beta is None else 1 - (1 - s) ** 2
        assert row["oracle_r2"] == pytest.approx(wanted, nan_ok=True)
    assert sum(math.isnan(row["oracle_r2"]) for row in rows) == 18


def test_sample_metrics_are_those_of_the_kernel_estimate():
    """On the line, where the blurred truth is the mixture with wider components."""
    evaluator = evaluator_of("mixture1d-default")
    distribution = DISTRIBUTIONS["mixture1d"]
    samples = 0.9 * distribution.sample(300, rng()) + 0.05
    axis = np.linspace(-1.6, 1.6, 200)
    width = bandwidth(distribution, evaluator.grid)
    found = stats.norm(samples.double().numpy().T, width).pdf(axis[:, None]).mean(1)
    found *= axis[1] - axis[0]
    parts = [(0.4, -1), (0.1, -1 / 3), (0.3, 1 / 3), (0.2, 1)]
    truth = sum(w * stats.norm(c, math.hypot(0.15, width)).pdf(axis) for w, c in parts)
    truth /= truth.sum()
    (row,) = evaluator.measure_samples(samples.unsqueeze(0))
    assert row["kl_sgld"] == pytest.approx(np.sum(truth * np.log(truth / found)), rel=1e-6)
    distance = np.abs(truth - found).sum() + 1 - found.sum()
    assert row["tv_sgld"] == pytest.approx(distance / 2, rel=1e-6)


def test_samples_depend_on_the_seed_and_the_step_alone(monkeypatch):
    small_evaluations(monkeypatch)
    together = evaluator_of(betas=("0", "0.5"), variants=("default", "true"), seeds=(3, 4))

    def same(x):  # of all members, whose samples differ by their random numbers alone
        return -0.05 * x.square().sum(-1)

    samples = together.samples(same, 50)
    assert samples.shape == (8, 200, 2)
    for member in range(2, 8):
        assert torch.equal(samples[member], samples[member % 2])
    assert not torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0, :100], samples[0, 100:])
    alone = evaluator_of(betas=("0.5",), seeds=(4,))
    assert torch.equal(alone.samples(same, 50)[0], samples[3])
    both = together.samples(EnsembleMLP(together.members.seed_of_each), 50)
    assert torch.equal(alone.samples(EnsembleMLP([4]), 50)[0], both[3])
    assert not torch.equal(together.samples(same, 51), samples)
    # Nor are they those that the training starts with.
    training = Draws(together.settings, alone.members, [4], CPU)
    started = evaluator_of("gmm-degenerate", seeds=(4,)).samples(same, 0)
    assert not torch.equal(training.chains(100)[0], started[:, :100])
