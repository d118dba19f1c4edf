"""Gaussian densities of images: against PyTorch's own, and the noise that they are fitted with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.flow.gaussian import TOGETHER, fit_gaussian


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn((6, 6), generator=generator) / 3
    return (torch.randn((count, 6), generator=generator) @ mixing).reshape(count, 1, 2, 3) + 0.2


def test_densities_are_those_of_a_multivariate_normal() -> None:
    x = images(TOGETHER + 50)
    rows = x.flatten(1).double()
    noise = 0.1 * torch.eye(6, dtype=torch.float64)
    covariance = torch.cov(rows.T, correction=0)
    for independent, expected in ((False, covariance), (True, covariance.diagonal().diag())):
        fitted = fit_gaussian(x, noise=0.1**0.5, independent=independent)
        reference = torch.distributions.MultivariateNormal(rows.mean(0), expected + noise)
        torch.testing.assert_close(fitted.log_density(x[:9]), reference.log_prob(rows[:9]))


def test_it_is_the_fit_to_images_with_the_noise_itself() -> None:
    x = images(200)
    generator = torch.Generator().manual_seed(1)
    many = x.repeat(1000, 1, 1, 1)
    noisy = many + 0.5 * torch.randn(many.shape, generator=generator)
    fitted = fit_gaussian(x, noise=0.5, independent=False)
    drawn = torch.cov(noisy.flatten(1).double().T, correction=0)
    torch.testing.assert_close(fitted.factor @ fitted.factor.T, drawn, rtol=0.02, atol=0.01)


def test_few_images_and_constant_pixels_have_a_density() -> None:
    x = torch.full((2, 1, 3, 3), -1.0)
    fitted = fit_gaussian(x, noise=0.03, independent=False)
    expected = torch.distributions.Normal(-1.0, 0.03).log_prob(torch.tensor(-1.0)) * 9
    assert float(fitted.log_density(x)[0]) == pytest.approx(float(expected), rel=1e-5)


def test_what_has_no_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="no images"):
        fit_gaussian(torch.zeros(0, 4), noise=0.03, independent=True)
    with pytest.raises(ConfigError, match="noise is 0"):
        fit_gaussian(torch.zeros(2, 4), noise=0, independent=True)
