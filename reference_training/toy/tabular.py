"""The optimum under fixed proposals, reached without a network and without samples.

With negatives from a fixed q the default loss is least at F = (log p_d - log q) / β + c
(*Energy-Based Model Training Objective Robust to Inaccurate SGLD Samples*, Appendix I with q
instead of the sampler; its Figure 9 shows networks trained so). Here F is a table with one value
per cell of a coarse grid, and the expectation of the loss with a single negative,

    L(F) = (1/β) sum_ij P_i Q_j softplus(β (F_j - F_i)),

is summed exactly. That is convex in F for β > 0, so what is found is the optimum itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ebmguard.errors import ConfigError

from .distributions import Distribution
from .grid import Grid
from .metrics import log_masses, offset_r2

__all__ = ["expected_loss", "optimum", "oracle_r2"]


def expected_loss(f: Tensor, p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The default loss (Eq. 8) with one negative, in expectation over x⁺ ~ p and x⁻ ~ q.

    Args:
        f: F in each cell, ``(cells,)``.
        p: probability of each cell under the data, ``(cells,)``.
        q: probability of each cell under the proposal, ``(cells,)``.
        beta: β, not 0.

    Returns:
        0-dim. Takes memory for two (cells, cells) matrices.
    """
    pairs = functional.softplus(beta * (f - f.unsqueeze(-1)))
    return p @ pairs @ q / beta


def optimum(p: Tensor, q: Tensor, beta: float, *, iterations: int = 100) -> Tensor:
    """The table F that minimises :func:`expected_loss`, by L-BFGS in float64.

    Args:
        p: as in :func:`expected_loss`.
        q: as in :func:`expected_loss`.
        beta: β, positive.
        iterations: of L-BFGS at most. A hundred leave 1e-6 of the variance on 40 cells a side.

    Returns:
        ``(cells,)`` float64, with a p-weighted mean of 0.

    Raises:
        ConfigError: where β is not positive: the loss is then not convex.
    """
    if not beta > 0:
        raise ConfigError(f"beta must be positive for the loss to be convex in F, not {beta}")
    p, q = p.double(), q.double()
    # Where a cell is rare on both sides F hardly matters and moves slowly. In units of the square
    # root of its curvature all cells move alike; the optimum is the same.
    units = (beta * (p + q)).rsqrt()
    scaled = torch.zeros_like(p, requires_grad=True)
    solver = torch.optim.LBFGS(
        [scaled],
        max_iter=iterations,
        tolerance_grad=1e-10,
        tolerance_change=0.0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        solver.zero_grad()
        loss = expected_loss(units * scaled, p, q, beta)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    solver.step(closure)  # type: ignore[no-untyped-call]
    f = (units * scaled).detach()
    return f - (p * f).sum()


def oracle_r2(distribution: Distribution, beta: float, resolution: int = 40) -> float:
    """Weighted R² of the optimal table against (log p_d - log q) / β + c, q = N(0, init_std² I).

    Args:
        distribution: p_d, with its own initial Gaussian as q.
        beta: β, positive.
        resolution: cells a side.

    Returns:
        :func:`~.metrics.offset_r2` weighted by p_d; 1 where theory and table agree.

    Raises:
        ConfigError: where β is not positive.
    """
    grid = Grid.of(distribution, resolution)
    log_p = log_masses(distribution.log_density(grid.points))
    log_q = log_masses(-0.5 * (grid.points / distribution.init_std).square().sum(-1))
    f = optimum(log_p.exp(), log_q.exp(), beta)
    return offset_r2(f, (log_p - log_q) / beta, log_p.exp()).item()
