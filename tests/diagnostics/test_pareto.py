"""The Pareto shape against arviz-stats, against known tails, and where it is undefined."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from arviz_stats.base.array import array_stats

from ebmguard.diagnostics import pareto_k

Draw = Callable[[np.random.Generator, int], np.ndarray]

DRAWS: dict[str, Draw] = {
    "normal 0.5": lambda rng, n: 0.5 * rng.normal(size=n),
    "normal 4": lambda rng, n: 4 * rng.normal(size=n),
    "student t, 3": lambda rng, n: rng.standard_t(3, size=n),
    "exponential": lambda rng, n: rng.exponential(size=n),
    "uniform": lambda rng, n: rng.uniform(size=n),
    "shifted far from 0": lambda rng, n: 1e4 + rng.normal(size=n),
}


def oracle(log_weights: np.ndarray) -> float:
    # psislw takes log likelihoods, of which the weights are the inverse.
    return float(array_stats.psislw(-log_weights)[1])


@pytest.mark.parametrize("name", DRAWS)
def test_agrees_with_arviz_stats(name: str) -> None:
    # 225 and 226 lie on either side of the change in the tail's length, 25 is the smallest n.
    for n in (25, 29, 64, 128, 225, 226, 1000, 4096):
        rng = np.random.default_rng(n)
        for _ in range(5):
            log_weights = DRAWS[name](rng, n)
            found = float(pareto_k(torch.from_numpy(log_weights)))
            assert found == pytest.approx(oracle(log_weights), rel=1e-6, abs=1e-6), n


# What arviz 0.23.4 has for the weights below: ``arviz.stats.psislw(log_weights)[1]``.
CLASSIC = {
    25: 0.5838813971409598,
    128: 0.5698454382399727,
    225: 0.6911917414306507,
    226: 0.69653988415158,
    1024: 0.7718007559029667,
}


@pytest.mark.parametrize("n", CLASSIC)
def test_differs_from_arviz_before_1_by_the_rounding_of_the_tail_alone(n: int) -> None:
    weights = (1 - np.modf(np.arange(1, n + 1) * 0.6180339887498949)[0]) ** -0.8
    share = min(n / 5, 3 * math.sqrt(n))
    upper = np.sort(weights)[-math.ceil(share) - 1 :]
    rounded_up = array_stats._gpdfit(upper[1:] - upper[0])[0]
    assert rounded_up == pytest.approx(CLASSIC[n], rel=1e-9)
    found = float(pareto_k(torch.from_numpy(np.log(weights))))
    assert (found == pytest.approx(CLASSIC[n], rel=1e-9)) == share.is_integer()


@pytest.mark.parametrize("k", [-0.3, 0.0, 0.7, 1.5])
def test_recovers_the_shape_of_a_generalised_pareto_tail(k: float) -> None:
    generator = torch.Generator().manual_seed(1)
    n, repeats = 4000, 60
    uniform = torch.rand(repeats, n, generator=generator, dtype=torch.float64)
    exponential = -torch.log1p(-uniform)
    weights = exponential if k == 0 else torch.expm1(k * exponential) / k
    found = pareto_k(weights.log())
    assert torch.equal(found[7], pareto_k(weights[7].log()))
    # The prior counts as 10 observations of 0.5 beside the tail's 189.
    tail = math.floor(3 * math.sqrt(n))
    expected = (tail * k + 10 * 0.5) / (tail + 10)
    # A tail of 189 has standard error (1 + k) / sqrt(189); the estimator's own bias is smaller.
    error = (1 + k) / math.sqrt(tail * repeats)
    assert float(found.mean()) == pytest.approx(expected, abs=4 * error + 0.02)


def test_order_and_scale_of_the_weights_and_their_dtype_do_not_matter() -> None:
    log_weights = torch.randn(64, requires_grad=True)
    expected = pareto_k(log_weights)
    assert (expected.shape, expected.dtype, expected.requires_grad) == ((), torch.float64, False)
    torch.testing.assert_close(pareto_k(log_weights[torch.randperm(64)]), expected)
    torch.testing.assert_close(pareto_k(log_weights.double() + 3.0), expected)
    half = log_weights.to(torch.bfloat16)
    torch.testing.assert_close(pareto_k(half), pareto_k(half.double()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_weight_that_is_not_finite_gives_nan_and_so_do_too_few(bad: float) -> None:
    log_weights = torch.randn(64)
    log_weights[log_weights.argmin()] = bad
    assert pareto_k(log_weights).isnan()
    assert pareto_k(torch.randn(0)).isnan()
    assert pareto_k(torch.randn(24)).isnan()


def test_equal_tail_gives_nan() -> None:
    assert pareto_k(torch.zeros(64)).isnan()
    tied = torch.randn(64).clamp(max=-0.5)
    assert pareto_k(tied).isnan()
    with pytest.raises(ValueError, match="All tail values are the same"):
        oracle(tied.double().numpy())


def test_weights_that_underflow_give_nan_and_not_the_prior() -> None:
    # All but the largest weight are 0 in float64. arviz-stats 0.8.0 reports a k near 0 here, that
    # of a light tail, for the heaviest tail there is.
    log_weights = -1e4 * torch.arange(64.0)
    with pytest.warns(RuntimeWarning):
        assert oracle(log_weights.double().numpy()) < 0.3
    assert pareto_k(log_weights).isnan()


def test_nothing_is_read_by_the_host() -> None:
    # Tensors on "meta" have no values: any synchronising call raises there.
    assert pareto_k(torch.empty(64, device="meta")).shape == ()
