from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.evaluate import (
    energy_scale,
    kl,
    log_masses,
    mode_mass_error,
    mode_masses,
    offset_r2,
    total_variation,
)
from ebmguard.reference_training.toy.grid import Grid

LOGS = hnp.arrays(np.float64, 7, elements=st.floats(-900, 900)).map(torch.from_numpy)


@given(LOGS, LOGS)
@settings(max_examples=100, deadline=None)
def test_divergence_is_that_of_scipy(log_p, log_q):
    p, q = log_masses(log_p).exp().numpy(), log_masses(log_q).exp().numpy()
    # scipy takes masses, which lose their digits below 2e-308.
    if (q >= np.finfo(q.dtype).tiny).all():
        assert kl(log_p, log_q).item() == pytest.approx(stats.entropy(p, q), rel=1e-9, abs=1e-9)


def test_divergence_between_gaussians():
    grid = Grid.of(DISTRIBUTIONS["gmm"])
    p, q = (
        -0.5 * ((grid.points - torch.tensor(m, dtype=torch.float64)) / s).square().sum(-1)
        for m, s in (((0.1, 0.0), 0.15), ((0.0, -0.1), 0.2))
    )
    closed = 2 * math.log(0.2 / 0.15) + (2 * 0.15**2 + 0.02) / (2 * 0.2**2) - 1
    assert kl(p, q).item() == pytest.approx(closed, rel=1e-9)


def test_cells_without_mass():
    p = torch.tensor([0.0, 0.0, -torch.inf])
    q = torch.tensor([0.0, -torch.inf, 0.0])
    assert kl(p, torch.zeros(3)).item() == pytest.approx(math.log(1.5))
    assert kl(p, q).item() == math.inf
    assert total_variation(p, q).item() == pytest.approx(0.5)
    underflown = torch.tensor([0.0, 0.0, -1e4])
    assert kl(underflown, p).item() == 0
    assert kl(p, underflown).item() == 0


def test_members_do_not_mix_and_nan_stays():
    p = torch.zeros(4)
    q = torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0], [torch.nan, 0, 0, 0], [torch.inf, 0, 0, 0]])
    for metric in (kl, total_variation):
        values = metric(p, q)
        assert values.dtype == torch.float64
        assert values[0] == 0
        assert values[1] == metric(p, q[1])
        assert values[2:].isnan().all()
    labels = torch.tensor([0, 0, 1, 1])
    assert mode_mass_error(p, q, labels).isnan().tolist() == [False, False, True, True]
    scale, r2 = energy_scale(q, torch.arange(4.0), p)
    assert scale.isnan().tolist() == [False, False, True, True]
    assert r2.isnan().tolist() == [True, False, True, True]
    assert offset_r2(q, torch.arange(4.0), p + 1).isnan().tolist() == [False, False, True, True]


def test_mode_masses_are_the_weights_of_the_mixture():
    gmm = DISTRIBUTIONS["gmm"]
    grid = Grid.of(gmm)
    labels = gmm.component_log_densities(grid.points).argmax(-1)
    log_p = gmm.log_density(grid.points)
    weights = torch.arange(1, 9, dtype=torch.float64) / 36
    # Neighbours lie 5.1 std apart: half a percent of one crosses to the other.
    torch.testing.assert_close(mode_masses(log_p, labels), weights, atol=2e-3, rtol=0)
    assert mode_mass_error(log_p, log_p, labels) == 0
    only = gmm.component_log_densities(grid.points)[:, 7]
    assert mode_mass_error(log_p, only, labels).item() == pytest.approx(1 - 8 / 36, abs=0.01)


def test_empty_cells_have_no_part_in_the_line():
    log_p = torch.tensor([0.0, -1.0, -2.0, -torch.inf])
    f = torch.tensor([1.0, 0.5, 0.0, -torch.inf])
    scale, r2 = energy_scale(f, log_p, log_p)
    assert scale.item() == pytest.approx(0.5)
    assert r2.item() == pytest.approx(1)
    assert offset_r2(f, 0.5 * log_p, log_p.exp()).item() == pytest.approx(1)


def test_offset_r2_frees_the_constant_and_nothing_else():
    target = torch.linspace(0, 1, 11, dtype=torch.float64)
    weight = torch.ones(11)
    f = torch.stack((target + 7, 0 * target, 2 * target))
    expected = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(offset_r2(f, target, weight), expected)
    noisy = target + torch.linspace(-1, 1, 11, dtype=torch.float64) ** 3
    wanted = 1 - np.var((noisy - target).numpy()) / np.var(target.numpy())
    assert offset_r2(noisy, target, weight).item() == pytest.approx(wanted)
