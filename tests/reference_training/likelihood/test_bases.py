"""Bases, verdicts and oracles against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.likelihood import (
    Bernoulli,
    Bracket,
    Estimate,
    Gaussian,
    bracket_log_z,
    enumerated_log_z,
    quadrature_log_z,
)
from tests.reference_training.likelihood.test_annealing import WIDE, modes
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
    ("starts", "said"),
    [("exact", "3.125"), ("long-run", "have forgotten where they"), ("data", "is no bound")],
)
def test_two_that_agree_bracket(starts, said):
    found = judged(starts=starts)
    assert found.problems == []
    assert found.verdict.startswith("these two bracket log Z within 0.13 nats, 2.985..3.1")
    assert said in found.verdict or starts == "exact"


def test_data_that_are_not_the_models_are_found_out():
    known = modes()
    options = {"temperatures": 100, "chains": 200}
    x = known.samples(400)
    exact = bracket_log_z(known.path, x[:200], starts="exact", **options, generator=rng(1))
    assert exact.problems == []
    assert exact.lower < known.log_z < exact.upper
    wrong = x[x[:, 0] < 0][:150]
    data = bracket_log_z(known.path, wrong, starts="data", **options, generator=rng(1))
    assert "not like samples of the model" in data.verdict


@pytest.mark.parametrize("wrong", [{"starts": "long"}, {"within": 0.0}, {"within": math.nan}])
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected one of exact, long-run, data"):
        judged(**wrong)


def test_independent_bits_are_a_product_also_of_several_visible_states_at_once():
    logits = torch.linspace(-2, 3, 16, dtype=torch.float64)
    expected = torch.nn.functional.softplus(logits).sum()
    torch.testing.assert_close(enumerated_log_z(lambda h: h @ logits, 16), expected)
    pull = torch.randn(5, 3)
    found = enumerated_log_z(lambda h: h @ pull.T, 3, like=pull)
    expected = torch.nn.functional.softplus(pull.double()).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "high"), [((-9,), (9,)), ((-9.0, -8.0), (9.0, 9.5))], ids=["1d", "2d"]
)
def test_a_gaussian_is_integrated(low, high):
    found = quadrature_log_z(lambda x: -x.square().sum(1) / 2, low, high, points=300)
    # Of an analytic function that is 0 at the ends the midpoint rule is exact to rounding.
    assert float(found) == pytest.approx(len(low) / 2 * math.log(2 * math.pi), abs=1e-12)


def test_a_box_is_what_is_integrated():
    found = quadrature_log_z(lambda x: x[:, 0] * 0 + 2, (0, 0), (3, 0.5), points=7)
    assert float(found) == pytest.approx(2 + math.log(1.5))


@pytest.mark.parametrize(
    ("low", "high", "points"),
    [((0,), (0,), 9), ((0, 0), (1,), 9), ((0, 0, 0), (1, 1, 1), 9), ((), (), 9), ((0,), (1,), 0)],
)
def test_what_is_no_box_is_refused(low, high, points):
    with pytest.raises(ConfigError, match="expected one or two numbers each"):
        quadrature_log_z(lambda x: x.sum(1), low, high, points=points)


@pytest.mark.parametrize("bits", [0, 21])
def test_what_cannot_be_enumerated_is_refused(bits):
    with pytest.raises(ConfigError, match=f"bits is {bits}, expected 1 to 20"):
        enumerated_log_z(lambda h: h.sum(1), bits)
