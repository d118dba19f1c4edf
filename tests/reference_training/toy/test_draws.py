"""Random numbers of an ensemble: whose they are, and how they go on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.draws import Draws
from ebmguard.reference_training.toy.members import Members
from ebmguard.reference_training.toy.scenario import SCENARIOS


def draws_of(betas=("0", "0.5"), seeds=(5, 6), scenario="gmm-default", **changes):
    settings = dataclasses.replace(SCENARIOS[scenario], **changes)
    members = Members.of(betas, ("default",), seeds)
    distribution = DISTRIBUTIONS[settings.data]
    return Draws(distribution, settings, members, members.seeds, torch.device("cpu"))


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


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    update(draws_of())
    assert torch.equal(torch.get_rng_state(), before)


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


def test_no_steps_need_no_noise():
    x0, noise = draws_of(scenario="circles-degenerate").chains(1)
    assert (x0.shape, noise.shape) == ((4, 1, 2), (0, 4, 1, 2))
