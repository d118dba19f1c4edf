"""What the toys draw: whose random numbers are whose, and what the broken samplers do wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ebmguard.reference_training.toy.members import Members
from ebmguard.reference_training.toy.sampler import Draws, make_sampler, make_training_sampler
from ebmguard.reference_training.toy.scenario import SAMPLERS, SCENARIOS
from ebmguard.samplers import Mixture

CPU = torch.device("cpu")
SETTINGS = SCENARIOS["gmm-default"]


class Quadratic(torch.nn.Module):
    """f = -|x|² / (2 std² o): with the scenario's output scale the density is N(0, std²)."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f: torch.Tensor = -x.square().sum(-1) / (2 * self.std**2 * SETTINGS.output_scale)
        return f


def chains(n, steps=SETTINGS.sgld_steps):
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn((steps + 1, 2, n, 2), generator=rng)
    return noise[0], noise[1:]


def test_a_broken_step_is_another_langevin_step():
    """Their drift and their noise still belong together, as o = 2 step_size / noise_std²."""
    f, (x0, noise) = Quadratic(1.0), chains(5, steps=1)
    one = replace(SETTINGS, sgld_steps=1)
    for name in ("good", "exploding", "stuck"):
        step = SAMPLERS[name].step
        other = replace(one, step_size=step, noise_std=0.1 * step**0.5)
        assert other.output_scale == pytest.approx(SETTINGS.output_scale)
        moved = make_sampler(one, name)(f, x0, noise)
        expected = x0 - step * x0 / SETTINGS.output_scale + 0.1 * step**0.5 * noise[0]
        torch.testing.assert_close(moved, expected)


def test_what_goes_wrong_on_a_mode_of_the_data():
    """The width of a mode of the GMM: steps of its samplers are 0.44 std² of it or fewer."""
    f, (x0, noise) = Quadratic(0.15), chains(1000)
    size = {
        name: make_sampler(SETTINGS, name)(f, x0, noise).square().mean().sqrt() / 0.15
        for name in SAMPLERS
    }
    # An AR(1) process of factor 1 - a with a = noise² / (2 std²) has the variance std² / (1 - a/2).
    a = 0.1**2 / (2 * 0.15**2)
    assert size["good"] == pytest.approx((1 - a / 2) ** -0.5, rel=0.05)
    assert size["exploding"] > 1e20
    assert size["stuck"] == pytest.approx(1 / 0.15, rel=0.1)
    assert make_sampler(SETTINGS, "lost")(Quadratic(10.0), x0, noise).min() > 1.6


def test_a_mixture_has_the_same_good_samples_and_says_whose_are_whose():
    f, (x0, noise) = Quadratic(1.0), chains(5)
    mixture = make_training_sampler(replace(SETTINGS, samplers="good+lost"), CPU)
    assert isinstance(mixture, Mixture)
    x = mixture(f, x0, noise)
    assert x.shape == (2, 10, 2)
    assert mixture.parts == {"good": slice(0, 5), "lost": slice(5, 10)}
    for name, part in mixture.parts.items():
        assert torch.equal(x[:, part], make_sampler(SETTINGS, name)(f, x0, noise))


def draws_of(betas=("0", "0.5"), seeds=(5, 6), scenario="gmm-default", **changes):
    settings = replace(SCENARIOS[scenario], **changes)
    members = Members.of(betas, ("default",), seeds)
    return Draws(settings, members, members.seeds, torch.device("cpu"))


def update(draws):
    return [draws.positives(), *draws.chains(4)]


def test_a_seed_draws_the_same_whoever_is_beside_it():
    together, alone = draws_of(), draws_of(betas=("0.5",), seeds=(6,))
    for _ in range(2):
        many, one = update(together), update(alone)
        for member in (1, 3):
            assert torch.equal(many[0][member], one[0][0])
            assert torch.equal(many[1][member], one[1][0])
            assert torch.equal(many[2][:, member], one[2][:, 0])


def test_chains_start_from_the_gaussian_and_their_noise_is_standard():
    draws = draws_of(init_mean=3.0, init_std=0.5, sgld_steps=5)
    x0, noise = draws.chains(5_000)
    assert (x0.shape, noise.shape) == ((4, 5_000, 2), (5, 4, 5_000, 2))
    assert x0.mean().item() == pytest.approx(3.0, abs=0.02)
    assert x0.std().item() == pytest.approx(0.5, abs=0.02)
    assert noise.mean().item() == pytest.approx(0.0, abs=0.02)
    assert noise.std().item() == pytest.approx(1.0, abs=0.02)
    # No step shares its noise with another one, nor with the start.
    steps = torch.cat([(x0[:1] - 3) / 0.5, noise[:, 0]]).flatten(1).double()
    assert (torch.corrcoef(steps) - torch.eye(6)).abs().max() < 0.05
