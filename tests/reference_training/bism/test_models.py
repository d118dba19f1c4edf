"""Models of few latents against sums, quadrature and each other, and the losses of scores."""

from __future__ import annotations

import math
from itertools import product

import ebm.losses as ebmkit
import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.annealed import Independent, bracket, joint_path
from ebmguard.reference_training.bism.matching import (
    contrastive,
    denoising,
    multiscale_denoising,
    sliced,
)
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from ebmguard.reference_training.likelihood import (
    Bernoulli,
    Gaussian,
    Schedule,
    forward,
    quadrature_log_z,
)
from tests.reference_training.parts import binary_states, rbm, rng


def test_f_posterior_and_log_z_of_an_rbm_are_sums_over_its_latents():
    model, v = rbm(), torch.randn(5, 2, generator=rng(1), dtype=torch.float64)
    states = binary_states(4)
    summed = (-model.energy(v[:, None], states)).logsumexp(1)
    torch.testing.assert_close(model(v), summed)
    shares = (-model.energy(v[:, None], states)).softmax(1)
    torch.testing.assert_close(model.posterior_logits(v).sigmoid(), shares @ states)
    by_quadrature = quadrature_log_z(model, (-20, -20), (20, 20)).item()
    assert model.log_z().item() == pytest.approx(by_quadrature, abs=1e-6)
    with pytest.raises(ConfigError, match="bits is 21, expected 1 to 20"):
        GaussianBernoulliRBM(2, 21, rng()).log_z()


def test_gibbs_samples_have_the_models_moments():
    model, count = rbm(), 20_000
    v = model.gibbs(torch.zeros(count, 2, dtype=torch.float64), 100, rng(4))
    states = binary_states(4)
    means = model.visible_mean(states)
    pulled = states @ model.weight.T
    scale = (2 * model.log_std).exp()
    log_mass = (
        states @ model.hidden_bias
        + pulled @ model.visible_bias
        + (pulled.square() * scale).sum(1) / 2
    )
    mean = log_mass.softmax(0) @ means
    square = log_mass.softmax(0) @ (means.square() + scale)
    std = (square - mean.square()).sqrt()
    for index in range(2):
        apart = abs(v[:, index].mean() - mean[index]) / (std[index] / math.sqrt(count))
        assert apart < 5
        torch.testing.assert_close(v[:, index].std(), std[index], rtol=0.05, atol=0)


SEEDS = 8


def starts(model, count, seed):
    """Exact samples: the latents' own probabilities are a table."""
    h = binary_states(len(model.hidden_bias))
    centre = model.visible_mean(h)
    precision = (-2 * model.log_std).exp()
    log_mass = h @ model.hidden_bias
    log_mass += ((centre.square() - model.visible_bias.square()) * precision).sum(1) / 2
    chosen = torch.multinomial(log_mass.softmax(0), count, True, generator=rng(seed))
    return model.sample_visible(h[chosen], rng(seed))


@pytest.mark.parametrize("visible", [2, 20])
def test_both_sides_are_within_a_twentieth_of_a_nat_of_the_sum(visible):
    model = rbm(visible, 4)
    log_z, sides = model.log_z().item(), []
    for seed in range(SEEDS):
        v = starts(model, 400, seed)
        found = bracket(model, v, temperatures=60, generator=rng(seed))
        sides.append((found.forward.log_z - log_z, found.reverse.log_z - log_z))
    ahead, back = torch.tensor(sides).T
    for side in ahead, back:
        assert abs(side.mean()) < 0.05
    # On average the sum lies between them, but for what so many seeds leave to chance.
    chance = 3 * (ahead.var() + back.var()).sqrt() / SEEDS**0.5
    assert ahead.mean() < chance
    assert back.mean() > -chance


def test_steps_keep_the_densities_between():
    # Few temperatures and many moves: weights are right only if each density is kept.
    model, count = rbm(), 10_000
    v = starts(model, 500, 3)
    h = model.sample_hidden(v, rng(4))
    base = Independent(Gaussian.fit(v, noise=0.1, independent=True), Bernoulli.fit(h))
    schedule = Schedule((0.0, 0.3, 0.6, 1.0))
    found = forward(joint_path(model, base), schedule, chains=count, generator=rng(5))
    assert found.log_z == pytest.approx(model.log_z().item(), abs=4 * found.standard_error)


WIDE = torch.float64
SCALE = torch.tensor([0.5, 2.0], dtype=WIDE)


def gaussian(v):
    """log N(0, diag(SCALE^2)) but for its constant."""
    return -(v / SCALE).square().sum(-1) / 2


def numbers(*shape: int, seed: int):
    return torch.randn(shape, generator=rng(seed), dtype=WIDE)


def test_sliced_and_multiscale_losses_of_a_gaussian_are_known():
    # Both coordinates' directions have unit covariance, so that nothing is left to chance.
    v = numbers(6, 2, seed=1)
    directions = [torch.tensor(u, dtype=WIDE).expand(6, 2) for u in product((-1, 1), repeat=2)]
    mean = sum(sliced(gaussian, v, u) for u in directions) / 4
    by_hand = (v / SCALE**2).square().sum(1) / 2 - (1 / SCALE**2).sum()
    torch.testing.assert_close(mean, by_hand)
    v, noise = numbers(6, 2, seed=4), numbers(6, 2, seed=5)
    many = multiscale_denoising(gaussian, v, noise, torch.full((6,), 0.1, dtype=WIDE), held=0.1)
    # At this level the two residuals differ by the factor 1 / 0.1.
    torch.testing.assert_close(many, denoising(gaussian, v, noise, 0.1) * 100)


@pytest.mark.parametrize("name", ["denoising", "sliced", "contrastive"])
def test_against_ebmkit(name):
    v = numbers(64, 2, seed=8)
    torch.manual_seed(9)
    noise = torch.distributions.Independent(
        torch.distributions.Normal(torch.zeros(2, dtype=WIDE), torch.ones(2, dtype=WIDE)), 1
    )
    losses = {
        "denoising": ebmkit.DenoisingScoreMatching(sigma=0.3),
        "sliced": ebmkit.SlicedScoreMatching(),
        "contrastive": ebmkit.NoiseContrastiveEstimation(noise_dist=noise).double(),
    }
    theirs = losses[name](lambda x: -gaussian(x), v).loss
    torch.manual_seed(9)
    drawn = noise.sample((64,)) if name == "contrastive" else torch.randn_like(v)
    ours = {
        "denoising": lambda: denoising(gaussian, v, drawn, 0.3),
        "sliced": lambda: sliced(gaussian, v, drawn),
        "contrastive": lambda: contrastive(
            gaussian(v) - noise.log_prob(v), gaussian(drawn) - noise.log_prob(drawn)
        ),
    }[name]()
    torch.testing.assert_close(ours.mean(), theirs)
