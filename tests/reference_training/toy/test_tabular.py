"""The optimum under fixed proposals, reached without a network and without samples.

With negatives from a fixed q the default loss is least at F = (log p_d - log q) / β + c (Appendix I
with q instead of the sampler; Figure 9 shows networks trained so). Here F is a table with one value
per cell of a coarse grid, and the expectation of the loss with a single negative,

    L(F) = (1/β) sum_ij P_i Q_j softplus(β (F_j - F_i)),

is summed exactly. That is convex in F for β > 0, so what is found is the optimum itself.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import softplus

from ebmguard import contrastive_loss
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.evaluate import kl, log_masses, offset_r2
from ebmguard.reference_training.toy.grid import Grid


def expected_loss(f, p, q, beta):
    """The default loss (Eq. 8) with one negative, in expectation over x⁺ ~ p and x⁻ ~ q."""
    return p @ softplus(beta * (f - f.unsqueeze(-1))) @ q / beta


def optimum(p, q, beta):
    """The table F that minimises it, by L-BFGS."""
    # Where a cell is rare on both sides F hardly matters and moves slowly. In units of the square
    # root of its curvature all cells move alike; the optimum is the same.
    units = (beta * (p + q)).rsqrt()
    scaled = torch.zeros_like(p, requires_grad=True)
    solver = torch.optim.LBFGS(
        [scaled],
        max_iter=100,
        tolerance_grad=1e-10,
        tolerance_change=0.0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure():
        solver.zero_grad()
        loss = expected_loss(units * scaled, p, q, beta)
        loss.backward()
        return loss.item()

    solver.step(closure)
    return (units * scaled).detach()


def test_expected_loss_is_the_mean_of_the_guards_over_all_pairs():
    rng = torch.Generator().manual_seed(0)
    f, p, q = (torch.randn(6, generator=rng, dtype=torch.float64) for _ in range(3))
    p, q = p.softmax(0), q.softmax(0)
    pairs = torch.cartesian_prod(f, f)
    of_pair = torch.vmap(partial(contrastive_loss, beta_star=0.7))
    total = (torch.outer(p, q).flatten() * of_pair(pairs[:, :1], pairs[:, 1:])).sum()
    torch.testing.assert_close(expected_loss(f, p, q, 0.7), total)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("beta", [0.3, 0.5, 0.9])
def test_table_reaches_the_theory(name, beta):
    distribution = DISTRIBUTIONS[name]
    grid = Grid.of(distribution, 20)
    log_p = log_masses(distribution.log_density(grid.points))
    log_q = log_masses(-0.5 * (grid.points / distribution.init_std).square().sum(-1))
    f = optimum(log_p.exp(), log_q.exp(), beta)
    assert offset_r2(f, (log_p - log_q) / beta, log_p.exp()) >= 0.99999
    # q exp(β F) is the truth again.
    assert kl(log_p, beta * f + log_q).item() == pytest.approx(0, abs=1e-3)
