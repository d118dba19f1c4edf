"""The samplers of the toys: the good one, and what the broken ones do wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ebmguard.reference_training.toy.sampler import make_sampler, make_training_sampler
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
