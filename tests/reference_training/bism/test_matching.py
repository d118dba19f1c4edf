"""The losses against Gaussians, another library's, and derivatives by hand."""

from __future__ import annotations

from itertools import product

import ebm.losses as ebmkit
import pytest
import torch
from torch.distributions import Independent, Normal

from ebmguard.reference_training.bism.matching import (
    contrastive,
    denoising,
    multiscale_denoising,
    score,
    sliced,
)

from .parts import rng

WIDE = torch.float64
SCALE = torch.tensor([0.5, 2.0], dtype=WIDE)


def gaussian(v):
    """log N(0, diag(SCALE^2)) but for its constant."""
    return -(v / SCALE).square().sum(-1) / 2


def numbers(*shape: int, seed: int):
    return torch.randn(shape, generator=rng(seed), dtype=WIDE)


def test_score_is_the_gradient():
    v = numbers(6, 2, seed=0)
    torch.testing.assert_close(score(gaussian, v), -v / SCALE**2)


def test_sliced_is_the_fisher_divergence_but_for_the_datas_constant():
    # Both coordinates' directions have unit covariance, so that nothing is left to chance.
    v = numbers(6, 2, seed=1)
    directions = [torch.tensor(u, dtype=WIDE).expand(6, 2) for u in product((-1, 1), repeat=2)]
    mean = sum(sliced(gaussian, v, u) for u in directions) / 4
    by_hand = (v / SCALE**2).square().sum(1) / 2 - (1 / SCALE**2).sum()
    torch.testing.assert_close(mean, by_hand)


def test_one_level_of_many_is_denoising_at_the_held_level():
    v, noise = numbers(6, 2, seed=4), numbers(6, 2, seed=5)
    many = multiscale_denoising(gaussian, v, noise, torch.full((6,), 0.1, dtype=WIDE), held=0.1)
    # At this level the two residuals differ by the factor 1 / 0.1.
    torch.testing.assert_close(many, denoising(gaussian, v, noise, 0.1) * 100)


@pytest.mark.parametrize("name", ["denoising", "sliced", "contrastive"])
def test_against_ebmkit(name):
    v = numbers(64, 2, seed=8)
    torch.manual_seed(9)
    noise = Independent(Normal(torch.zeros(2, dtype=WIDE), torch.ones(2, dtype=WIDE)), 1)
    losses = {
        "denoising": ebmkit.DenoisingScoreMatching(sigma=0.3),
        "sliced": ebmkit.SlicedScoreMatching(),
        "contrastive": ebmkit.NoiseContrastiveEstimation(noise_dist=noise).double(),
    }
    theirs = losses[name](lambda x: -gaussian(x), v).loss
    torch.manual_seed(9)
    drawn = noise.sample((64,)) if name == "contrastive" else torch.randn_like(v)
    ours = {
        "denoising": lambda: denoising(gaussian, v, drawn, 0.3),
        "sliced": lambda: sliced(gaussian, v, drawn),
        "contrastive": lambda: contrastive(
            gaussian(v) - noise.log_prob(v), gaussian(drawn) - noise.log_prob(drawn)
        ),
    }[name]()
    torch.testing.assert_close(ours.mean(), theirs)
