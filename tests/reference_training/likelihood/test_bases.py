"""Bases, verdicts and oracles against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.likelihood import (
    Bernoulli,
    Bracket,
    Estimate,
    Gaussian,
    enumerated_log_z,
    quadrature_log_z,
)
from tests.reference_training.likelihood.test_annealing import WIDE
from tests.reference_training.parts import rng


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


def test_constant_pixels_have_a_density_and_what_has_no_fit_is_refused() -> None:
    x = torch.full((2, 1, 3, 3), -1.0)
    fitted = Gaussian.fit(x, noise=0.03, independent=False)
    expected = torch.distributions.Normal(-1.0, 0.03).log_prob(torch.tensor(-1.0)) * 9
    assert float(fitted.log_prob(x)[0]) == pytest.approx(float(expected), rel=1e-5)
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


NONE = torch.zeros(0, dtype=WIDE)


def side(
    log_z: float, *, spread: float = 0.1, f: float = 0.0, is_reverse: bool = False
) -> Estimate:
    """Of 100 chains whose log weights are `spread` above or below log Z."""
    signs = torch.tensor([1.0, -1.0], dtype=WIDE).repeat(50)
    log_weights = (-log_z if is_reverse else log_z) + spread * signs
    return Estimate(log_weights, NONE, f + signs, NONE, NONE, is_reverse)


def judged(
    low: float = 3.0, high: float = 3.1, *, starts="exact", within=1.0, **reverse
) -> Bracket:
    return Bracket(side(low), side(high, is_reverse=True, **reverse), starts, within)


def carried_by_one() -> Bracket:
    found = judged()
    heavy = found.reverse.log_weights.clone()
    heavy[0] += 50
    return replace(found, reverse=replace(found.reverse, log_weights=heavy))


def test_numbers_are_those_of_the_weights():
    found = side(2.0, spread=0.3)
    assert found.log_z == pytest.approx(2 + math.log(math.cosh(0.3)))
    ratio = torch.tensor([math.exp(0.3), math.exp(-0.3)]) / math.cosh(0.3)
    assert found.ess == pytest.approx(100 / float(ratio.square().mean()))
    error = float(ratio.std(correction=0)) / 10
    assert found.standard_error == pytest.approx(error)
    both = judged(2.0, 2.2)
    assert both.lower == pytest.approx(both.forward.log_z - 2 * both.forward.standard_error)
    assert both.upper == pytest.approx(both.reverse.log_z + 2 * both.reverse.standard_error)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (judged(3, 5), "apart"),
        (judged(3, 2), "below the forward one"),
        (carried_by_one(), "reverse has 1.0 effective chains of 100"),
        (judged(f=5.0), "mean f is 5, the model's"),
        (judged(math.inf), "the forward estimate is inf"),
    ],
)
def test_the_reason_is_said_where_they_do_not(found, said):
    assert found.verdict.startswith("they do not bracket log Z within")
    assert said in found.verdict


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: judged(starts="long"), "expected one of exact, long-run, data"),
        (lambda: judged(within=math.nan), "expected one of exact, long-run, data"),
        (lambda: quadrature_log_z(_sum, (0,), (0,)), "expected one or two numbers each"),
        (lambda: quadrature_log_z(_sum, (0, 0, 0), (1, 1, 1)), "expected one or two numbers each"),
        (lambda: quadrature_log_z(_sum, (0,), (1,), points=0), "expected one or two numbers each"),
        (lambda: enumerated_log_z(_sum, 21), "bits is 21, expected 1 to 20"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        wrong()


def _sum(x):
    return x.sum(1)


def test_independent_bits_are_a_product_also_of_several_visible_states_at_once():
    logits = torch.linspace(-2, 3, 16, dtype=torch.float64)
    expected = torch.nn.functional.softplus(logits).sum()
    torch.testing.assert_close(enumerated_log_z(lambda h: h @ logits, 16), expected)
    pull = torch.randn(5, 3)
    found = enumerated_log_z(lambda h: h @ pull.T, 3, like=pull)
    expected = torch.nn.functional.softplus(pull.double()).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
