from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebmguard import contrastive_loss
from ebmguard.errors import ConfigError
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.grid import Grid
from ebmguard.reference_training.toy.metrics import energy_scale, kl, log_masses, offset_r2
from ebmguard.reference_training.toy.tabular import expected_loss, optimum, oracle_r2


def cells(n, seed):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=rng, dtype=torch.float64)


def masses(n, seed):
    return cells(n, seed).softmax(0)


@given(st.integers(0, 1000), st.floats(0.05, 3))
@settings(max_examples=50, deadline=None)
def test_expected_loss_is_the_mean_of_the_guards_over_all_pairs(seed, beta):
    f, p, q = cells(6, seed), masses(6, seed + 1), masses(6, seed + 2)
    total = sum(
        p[i] * q[j] * contrastive_loss(f[i : i + 1], f[j : j + 1], beta)
        for i in range(6)
        for j in range(6)
    )
    torch.testing.assert_close(expected_loss(f, p, q, beta), total)


def test_expected_loss_and_its_gradient_are_those_of_samples():
    """The guard's loss with one negative per positive, averaged over many draws."""
    f, p, q = cells(5, 0).requires_grad_(), masses(5, 1), masses(5, 2)
    rng = torch.Generator().manual_seed(0)
    n = 200_000
    pos = torch.multinomial(p, n, replacement=True, generator=rng)
    neg = torch.multinomial(q, n, replacement=True, generator=rng)
    of_pair = torch.vmap(partial(contrastive_loss, beta_star=0.7))
    drawn = of_pair(f[pos, None], f[neg, None]).mean()
    exact = expected_loss(f, p, q, 0.7)
    torch.testing.assert_close(drawn, exact, rtol=0, atol=0.01)
    for a, b in zip(torch.autograd.grad(drawn, f), torch.autograd.grad(exact, f), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.005)


@given(st.integers(0, 1000), st.floats(0.1, 3))
@settings(max_examples=20, deadline=None)
def test_gradient_vanishes_at_the_theory_and_only_there(seed, beta):
    p, q = masses(8, seed), masses(8, seed + 1)
    theory = ((p.log() - q.log()) / beta).requires_grad_()
    (at_theory,) = torch.autograd.grad(expected_loss(theory, p, q, beta), theory)
    torch.testing.assert_close(at_theory, torch.zeros(8, dtype=p.dtype), rtol=0, atol=1e-14)
    found = optimum(p, q, beta)
    theory = theory.detach() - (p * theory.detach()).sum()
    torch.testing.assert_close(found, theory, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("beta", [0.3, 0.5, 0.9])
def test_table_reaches_the_theory(name, beta):
    assert oracle_r2(DISTRIBUTIONS[name], beta, resolution=24) >= 0.99999


def test_beta_sets_the_scale_of_what_is_learned():
    """At β = 0.5 the table is 1/0.5 times the log ratio, not the log ratio."""
    gmm = DISTRIBUTIONS["gmm"]
    grid = Grid.of(gmm, 24)
    log_p = log_masses(gmm.log_density(grid.points))
    log_q = log_masses(-0.5 * grid.points.square().sum(-1))
    f = optimum(log_p.exp(), log_q.exp(), 0.5)
    scale, _ = energy_scale(f, log_p - log_q, log_p)
    assert scale.item() == pytest.approx(2, rel=1e-3)
    assert offset_r2(f, log_p - log_q, log_p.exp()) < 0.5
    # q exp(β F) is the truth again.
    assert kl(log_p, 0.5 * f + log_q).item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("beta", [0.0, -0.5, float("nan")])
def test_refuses_what_is_not_convex(beta):
    with pytest.raises(ConfigError, match="must be positive"):
        oracle_r2(DISTRIBUTIONS["mixture1d"], beta)
