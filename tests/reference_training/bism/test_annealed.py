"""Annealing (v, h) of an RBM against the sum over its latents."""

from __future__ import annotations

import pytest
import torch

from ebmguard.reference_training.bism.annealed import Independent, bracket, joint_path
from ebmguard.reference_training.likelihood import Bernoulli, Gaussian, Schedule, forward

from .parts import binary_states, rbm, rng

SEEDS = 8


def starts(model, count, seed):
    """Exact samples: the latents' own probabilities are a table."""
    h = binary_states(len(model.hidden_bias))
    centre = model.visible_mean(h)
    precision = (-2 * model.log_std).exp()
    log_mass = h @ model.hidden_bias
    log_mass += ((centre.square() - model.visible_bias.square()) * precision).sum(1) / 2
    chosen = torch.multinomial(log_mass.softmax(0), count, True, generator=rng(seed))
    return model.sample_visible(h[chosen], rng(seed))


@pytest.mark.parametrize("visible", [2, 20])
def test_both_sides_are_within_a_twentieth_of_a_nat_of_the_sum(visible):
    model = rbm(visible, 4)
    log_z, sides = model.log_z().item(), []
    for seed in range(SEEDS):
        v = starts(model, 400, seed)
        found = bracket(model, v, temperatures=60, generator=rng(seed))
        sides.append((found.forward.log_z - log_z, found.reverse.log_z - log_z))
    ahead, back = torch.tensor(sides).T
    for side in ahead, back:
        assert abs(side.mean()) < 0.05
    # On average the sum lies between them, but for what so many seeds leave to chance.
    chance = 3 * (ahead.var() + back.var()).sqrt() / SEEDS**0.5
    assert ahead.mean() < chance
    assert back.mean() > -chance


def test_steps_keep_the_densities_between():
    # Few temperatures and many moves: weights are right only if each density is kept.
    model, count = rbm(), 10_000
    v = starts(model, 500, 3)
    h = model.sample_hidden(v, rng(4))
    base = Independent(Gaussian.fit(v, noise=0.1, independent=True), Bernoulli.fit(h))
    schedule = Schedule((0.0, 0.3, 0.6, 1.0))
    found = forward(joint_path(model, base), schedule, chains=count, generator=rng(5))
    assert found.log_z == pytest.approx(model.log_z().item(), abs=4 * found.standard_error)
