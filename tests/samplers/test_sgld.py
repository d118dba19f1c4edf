"""SGLD against the linear recursion that it is on a quadratic energy; sizes, numbers of steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.errors import ConfigError, ShapeError
from ebmguard.samplers import annealed, random_steps, sgld, sgld_step, start_chains
from tests.samplers.parts import PRECISION, Gaussian, bowl, normals, seeded

ONE_SIZE: Any = {"step_size": 0.1, "noise_std": 1.0}


def test_step_is_drift_then_noise_and_always_accepted():
    x, z = normals(5, 2), normals(5, 2, seed=1)
    moved, proposal = sgld_step(bowl, start_chains(bowl, x), **ONE_SIZE, generator=seeded(1))
    torch.testing.assert_close(moved.x, x - 0.1 * x @ PRECISION + z, rtol=0, atol=1e-15)
    assert all(map(torch.equal, proposal.chains, moved))
    assert proposal.accepted.all()
    assert (proposal.acceptance == 1).all()
    assert not proposal.divergent.any()


def test_step_without_noise_draws_nothing_and_says_where_the_energy_is_lost():
    def walled(x):
        return torch.where(x[:, 0] > 1, torch.nan, x[:, 0])

    rng, start = seeded(1), start_chains(walled, torch.tensor([[0.0], [0.9]]))
    before = rng.get_state()
    moved, proposal = sgld_step(walled, start, step_size=0.5, noise_std=0.0, generator=rng)
    assert torch.equal(moved.x, start.x + 0.5 * start.grad)
    assert proposal.divergent.tolist() == [False, True]
    assert torch.equal(rng.get_state(), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_size": [0.1, -0.1]}, "step_size is -0.1"),
        ({"noise_std": [0.1]}, "noise_std has 1 entries for 2 steps"),
        ({"step_size": (0.1, 0.1, 0.1)}, "step_size has 3 entries for 2 steps"),
        ({"clamp": (1.0, -1.0)}, "low < high"),
        ({"grad_clip": 0.0}, "grad_clip is 0.0"),
        ({"noise": normals(2, 2, 2), "generator": seeded(0)}, "both given"),
    ],
)
def test_refuses_settings_of_its_own(settings, message):
    with pytest.raises(ConfigError, match=message):
        sgld(bowl, normals(2, 2), steps=2, **{**ONE_SIZE, **settings})
    chains = start_chains(bowl, normals(2, 2))._replace(grad=torch.zeros(2))
    with pytest.raises(ShapeError, match=r"grad has shape \(2,\)"):
        sgld_step(bowl, chains, **ONE_SIZE)


# -- steps of several sizes, clamped samples, and a clipped gradient -------------------------


@pytest.mark.parametrize(
    ("dtype", "atol", "beta", "annealing"),
    [(torch.float64, 1e-12, 0.25, True), (torch.float32, 1e-6, 0.0, False)],
)
def test_a_chain_is_the_linear_recursion_of_its_noise(dtype, atol, beta, annealing):
    """Another matrix and another noise at every step, and under a guard the slope of (1 - β) f."""
    stds = annealed(1.0, 0.1 if annealing else 1.0, 5)
    sizes = [0.1 * std for std in stds]
    x0, noise = normals(4, 2).to(dtype), normals(5, 4, 2, seed=1).to(dtype)
    _, sample_q = guard(None, sgld, beta=beta, output_scale=1.0)
    settings: Any = {"step_size": sizes, "noise_std": stds} if annealing else ONE_SIZE
    x = sample_q(Gaussian().to(dtype), x0, steps=5, **settings, noise=noise)
    expected = x0.double()
    for size, std, z in zip(sizes, stds, noise, strict=True):
        expected = expected - (1 - beta) * size * expected @ PRECISION + std * z
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=atol)


def test_samples_are_clamped_after_every_step():
    x0 = expected = normals(50, 2).clamp(-0.5, 1.0)
    settings: Any = {**ONE_SIZE, "clamp": (-0.5, 1.0)}
    chains, noise = start_chains(bowl, x0), normals(5, 50, 2, seed=1)
    for z in noise:
        expected = (expected - 0.1 * expected @ PRECISION + z).clamp(-0.5, 1.0)
        chains, _ = sgld_step(bowl, chains, **settings, noise=z)
    torch.testing.assert_close(chains.x, expected, rtol=0, atol=1e-12)
    assert torch.equal(sgld(bowl, x0, steps=5, **settings, noise=noise), chains.x)


def test_gradient_is_clipped_entry_by_entry_before_the_step():
    slope = torch.tensor([3.0, -0.02, 0.0, -7.0, torch.nan])
    settings: Any = {"step_size": 10.0, "noise_std": 0.0}

    def f(x):
        return x @ slope

    x = sgld(f, torch.zeros(1, 5), steps=2, **settings, grad_clip=0.05)
    expected = torch.tensor([[1.0, -0.4, 0.0, -1.0, torch.nan]])
    torch.testing.assert_close(x, expected, equal_nan=True)
    moved, _ = sgld_step(f, start_chains(f, torch.zeros(1, 5)), **settings, grad_clip=0.05)
    torch.testing.assert_close(moved.x, expected / 2, equal_nan=True)
    wide, plain = (
        sgld(f, torch.zeros(1, 5), steps=2, **settings, grad_clip=clip) for clip in (10.0, None)
    )
    assert torch.equal(wide[:, :4], plain[:, :4])


def test_tempering_has_no_hold_where_the_clip_cuts():
    """As docs/samplers.md warns: the guard's factor changes the second entry alone."""
    slope = nn.Linear(2, 1, bias=False)
    nn.init.constant_(slope.weight, 7.0)
    slope.weight.data[0, 1] = 0.04
    settings: Any = {"steps": 1, "step_size": 1.0, "noise_std": 0.0, "grad_clip": 0.05}
    _, sample_q = guard(None, sgld, beta=0.25, output_scale=1.0)
    x = sample_q(slope, torch.zeros(1, 2), **settings)
    torch.testing.assert_close(x, torch.tensor([[0.05, 0.03]]))


# -- given noise -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 2), (3, 6, 2)])
def test_given_noise_is_that_of_the_generator(shape):
    """The members of an ensemble share it: they are the chains with copies of it."""
    x0 = normals(*shape)
    settings: Any = {"steps": 4, **ONE_SIZE}
    drawn, rng = sgld(bowl, x0, **settings, generator=seeded(5)), seeded(5)
    noise = torch.stack([torch.randn(shape, dtype=x0.dtype, generator=rng) for _ in range(4)])
    before = torch.get_rng_state()
    assert torch.equal(sgld(bowl, x0, **settings, noise=noise), drawn)
    shared = noise[:, :1]
    expected = sgld(bowl, x0, **settings, noise=shared.expand(noise.shape))
    assert torch.equal(sgld(bowl, x0, **settings, noise=shared), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 4, 3), r"\(3, 4, 3\).*\(3, 4, 2\)"),
        ((1, 3, 4, 2), r"\(1, 3, 4, 2\).*\(3, 4, 2\)"),
        # These would give every step the same noise.
        ((1, 4, 2), r"draws for 3 steps: \(3, 4, 2\)"),
        # As many samples as steps: (steps, dim) would broadcast, and not be what it looks like.
        ((3, 2), r"draws for 3 steps: \(3, 3, 2\)"),
    ],
)
def test_refuses_noise_of_another_shape(shape, message):
    x0 = normals(3 if shape == (3, 2) else 4, 2)
    with pytest.raises(ShapeError, match=message):
        sgld(bowl, x0, steps=3, **ONE_SIZE, noise=torch.zeros(shape))


# -- sizes and numbers of steps, against the formulas they are named after -------------------------


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
        (lambda: annealed(1.0, 0.1, 3, shape="step"), "'step'; expected one of 'linear', 'geom"),  # type: ignore[arg-type]
        (lambda: random_steps(4, 3, torch.Generator()), "low is 4 and high is 3"),
        # One that would have to be waited for.
        (lambda: random_steps(1, 2, Elsewhere()), "generator is on cuda:0"),
    ],
)
def test_refuses_schedules(call, message):
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
