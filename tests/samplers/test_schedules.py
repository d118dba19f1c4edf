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
from tests.samplers.parts import seeded

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


class Elsewhere(torch.Generator):
    device = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: annealed(1.0, 0.1, -1), "steps is -1"),
        (lambda: annealed(1.0, math.inf, 3, shape="linear"), "last is inf"),
        (lambda: annealed(1.0, 0.0, 3), "geometric shape is for numbers above 0"),
        (lambda: annealed(-1.0, -2.0, 3), "geometric shape"),
        (lambda: annealed(1.0, 0.1, 3, shape="step"), "'step'; expected one of 'linear', 'geom"),  # type: ignore[arg-type]
        (lambda: random_steps(-1, 3, torch.Generator()), "low is -1 and high is 3"),
        (lambda: random_steps(4, 3, torch.Generator()), "low is 4 and high is 3"),
        # One that would have to be waited for.
        (lambda: random_steps(1, 2, Elsewhere()), "generator is on cuda:0"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_numbers_of_steps_are_uniform_and_come_from_the_generator_alone():
    n, before = 7000, torch.get_rng_state()
    one, other = ([random_steps(4, 10, rng) for _ in range(n)] for rng in map(seeded, (0, 1)))
    assert one == [random_steps(4, 10, rng) for rng in [seeded(0)] for _ in range(n)] != other
    assert torch.equal(torch.get_rng_state(), before)
    counts = torch.tensor(one).bincount()
    assert counts[:4].sum() == 0
    assert len(counts) == 11
    # Binomial: five standard deviations of a number with probability 1/7.
    assert (counts[4:] - n / 7).abs().max() < 5 * (n * 6 / 49) ** 0.5
    assert random_steps(3, 3, seeded(0)) == 3
