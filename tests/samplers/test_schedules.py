"""Sizes and numbers of steps, against the formulas they are named after."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.errors import ConfigError
from ebmguard.samplers import annealed, random_steps

above_zero = st.floats(1e-6, 1e6)


@given(
    above_zero, above_zero, st.integers(2, 50), st.sampled_from(["linear", "geometric", "cosine"])
)
def test_runs_from_the_first_to_the_last_without_turning(first, last, steps, shape):
    values = annealed(first, last, steps, shape=shape)
    assert len(values) == steps
    assert values[0] == pytest.approx(first)
    assert values[-1] == pytest.approx(last)
    tolerance = 1e-9 * max(first, last) ** 2
    for one, other in itertools.pairwise(values):
        assert (other - one) * (last - first) >= -tolerance


@pytest.mark.parametrize(
    ("arguments", "shape", "expected"),
    [
        ((1.0, 0.0, 5), "linear", [1, 0.75, 0.5, 0.25, 0]),
        ((8.0, 0.5, 5), "geometric", [8, 4, 2, 1, 0.5]),
        ((2.0, 0.0, 5), "cosine", [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0]),
        ((2.0, 0.5, 1), "geometric", [0.5]),  # the only step is the last
        ((2.0, 0.5, 0), "geometric", []),
    ],
)
def test_the_numbers_of_each_shape(arguments, shape, expected):
    assert annealed(*arguments, shape=shape) == pytest.approx(expected)
    if shape == "geometric":
        assert annealed(*arguments) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "shape", "message"),
    [
        ((1.0, 0.1, -1), "geometric", "steps is -1"),
        ((1.0, math.inf, 3), "linear", "last is inf"),
        ((1.0, 0.0, 3), "geometric", "geometric shape is for numbers above 0"),
        ((-1.0, -2.0, 3), "geometric", "geometric shape"),
        ((1.0, 0.1, 3), "step", "shape='step'; expected one of linear, geometric, cosine"),
    ],
)
def test_refuses_ends_and_shapes(arguments, shape, message):
    with pytest.raises(ConfigError, match=message):
        annealed(*arguments, shape=shape)


def test_numbers_of_steps_are_uniform():
    rng = torch.Generator().manual_seed(0)
    n = 7000
    counts = torch.tensor([random_steps(4, 10, rng) for _ in range(n)]).bincount()
    assert counts[:4].sum() == 0
    assert len(counts) == 11
    # Binomial: five standard deviations of a number with probability 1/7.
    assert (counts[4:] - n / 7).abs().max() < 5 * (n * 6 / 49) ** 0.5
    assert random_steps(3, 3, rng) == 3


def test_numbers_of_steps_come_from_the_generator_alone():
    before = torch.get_rng_state()
    draws = [
        [random_steps(0, 1000, torch.Generator().manual_seed(seed)) for _ in range(2)]
        for seed in (1, 2)
    ]
    assert draws[0][0] == draws[0][1] != draws[1][0]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (4, 3)])
def test_refuses_intervals(low, high):
    with pytest.raises(ConfigError, match=f"low is {low} and high is {high}"):
        random_steps(low, high, torch.Generator())


def test_refuses_a_generator_that_would_have_to_be_waited_for():
    class Elsewhere:
        device = torch.device("cuda:0")

    with pytest.raises(ConfigError, match="generator is on cuda:0"):
        random_steps(1, 2, Elsewhere())  # type: ignore[arg-type]
