"""Bases against PyTorch's own distributions, and the noise that Gaussians are fitted with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.likelihood import Bernoulli, Gaussian
from tests.reference_training.likelihood.parts import rng


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn((6, 6), generator=generator) / 3
    return (torch.randn((count, 6), generator=generator) @ mixing).reshape(count, 1, 2, 3) + 0.2


def test_densities_are_those_of_a_multivariate_normal() -> None:
    x = images(5000)
    rows = x.flatten(1).double()
    noise = 0.1 * torch.eye(6, dtype=torch.float64)
    covariance = torch.cov(rows.T, correction=0)
    for independent, expected in ((False, covariance), (True, covariance.diagonal().diag())):
        fitted = Gaussian.fit(x, noise=0.1**0.5, independent=independent)
        reference = torch.distributions.MultivariateNormal(rows.mean(0), expected + noise)
        torch.testing.assert_close(fitted.log_prob(x[:9]), reference.log_prob(rows[:9]))


def test_it_is_the_fit_to_images_with_the_noise_itself() -> None:
    x = images(200)
    generator = torch.Generator().manual_seed(1)
    many = x.repeat(1000, 1, 1, 1)
    noisy = many + 0.5 * torch.randn(many.shape, generator=generator)
    fitted = Gaussian.fit(x, noise=0.5, independent=False)
    drawn = torch.cov(noisy.flatten(1).double().T, correction=0)
    torch.testing.assert_close(fitted.factor @ fitted.factor.T, drawn, rtol=0.02, atol=0.01)


def test_few_images_and_constant_pixels_have_a_density() -> None:
    x = torch.full((2, 1, 3, 3), -1.0)
    fitted = Gaussian.fit(x, noise=0.03, independent=False)
    expected = torch.distributions.Normal(-1.0, 0.03).log_prob(torch.tensor(-1.0)) * 9
    assert float(fitted.log_prob(x)[0]) == pytest.approx(float(expected), rel=1e-5)


def test_what_has_no_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        Gaussian.fit(torch.zeros(0, 4), noise=0.03, independent=True)
    with pytest.raises(ConfigError, match="noise is 0"):
        Gaussian.fit(torch.zeros(2, 4), noise=0, independent=True)
    with pytest.raises(ConfigError, match="no bits"):
        Bernoulli.fit(torch.full((2, 4), 0.5))


@pytest.mark.parametrize("independent", [False, True])
def test_a_gaussian_draws_from_its_density(independent: bool) -> None:
    fitted = Gaussian.fit(images(300), noise=0.2, independent=independent)
    x = fitted.sample(50_000, rng())
    assert (x.shape[1:], x.dtype) == ((1, 2, 3), torch.float32)
    factor = fitted.factor.diag() if independent else fitted.factor
    covariance = factor @ factor.T
    error = float(covariance.diagonal().max()) * (2 / 50_000) ** 0.5
    drawn = torch.cov(x.flatten(1).double().T)
    torch.testing.assert_close(drawn, covariance, rtol=0, atol=4 * error)
    # E[log q] is the negative entropy.
    entropy = torch.distributions.MultivariateNormal(torch.zeros(6), covariance.float()).entropy()
    assert float(fitted.log_prob(x).mean()) == pytest.approx(-float(entropy), abs=0.04)
    assert torch.equal(fitted.sample(3, rng(1)), fitted.sample(3, rng(1)))


def test_a_bernoulli_is_that_of_pytorch() -> None:
    p = torch.tensor([[0.1, 0.5], [0.8, 0.99]])
    x = torch.bernoulli(p.expand(2000, 2, 2), generator=rng())
    fitted = Bernoulli.fit(x)
    means = (x.sum(0) + 1) / 2002
    reference = torch.distributions.Independent(torch.distributions.Bernoulli(means), 2)
    torch.testing.assert_close(fitted.log_prob(x), reference.log_prob(x))
    drawn = fitted.sample(20_000, rng(1)).mean(0)
    torch.testing.assert_close(drawn, means, rtol=0, atol=4 * 0.5 / 20_000**0.5)
    # A bit that was always 0 may be 1 all the same.
    assert Bernoulli.fit(torch.zeros(8, 1)).log_prob(torch.ones(1, 1)).exp() == pytest.approx(0.1)
