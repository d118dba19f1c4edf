"""The Gaussian-Bernoulli RBM against sums over its latents, quadrature and its own chains."""

from __future__ import annotations

import math

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from ebmguard.reference_training.likelihood import quadrature_log_z

from .parts import binary_states, rbm, rng


def test_more_latents_than_can_be_summed_are_refused():
    with pytest.raises(ConfigError, match="bits is 21, expected 1 to 20"):
        GaussianBernoulliRBM(2, 21, rng()).log_z()


def test_f_is_the_sum_over_the_latents():
    model, v = rbm(), torch.randn(5, 2, generator=rng(1), dtype=torch.float64)
    states = binary_states(4)
    summed = (-model.energy(v[:, None], states)).logsumexp(1)
    torch.testing.assert_close(model(v), summed)


def test_the_posterior_is_bayes_rule():
    model, v = rbm(), torch.randn(5, 2, generator=rng(1), dtype=torch.float64)
    states = binary_states(4)
    shares = (-model.energy(v[:, None], states)).softmax(1)
    torch.testing.assert_close(model.posterior_logits(v).sigmoid(), shares @ states)


def test_log_z_is_that_of_quadrature():
    model = rbm()
    by_quadrature = quadrature_log_z(model, (-20, -20), (20, 20)).item()
    assert model.log_z().item() == pytest.approx(by_quadrature, abs=1e-6)


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
