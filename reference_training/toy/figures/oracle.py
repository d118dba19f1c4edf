"""Sentences on the optimum that is known where negatives come from a fixed proposal."""

from __future__ import annotations

from ...plots.numbers import number
from ..distributions import DISTRIBUTIONS
from ..tabular import oracle_r2
from .runs import ToyRun
from .specs import FigureSpec
from .spread import spread
from .words import DATA, OFF, listed, negatives

TABULAR_BETAS = (0.3, 0.5, 0.9)
CELLS = 40


def optimum_reached(spec: FigureSpec, run: ToyRun) -> str:
    """How close the networks of a run came to the optimum, at every β but 0."""
    reached = [
        f"{number(spread(run, beta, 'default', 'oracle_r2').median)} at {beta}"
        for beta in spec.betas
        if beta != OFF
    ]
    return (
        f"{run.scenario}, {negatives(run)}: R², weighted by p_d, of F against the optimum "
        f"(log p_d − log q)/β + c: {listed(reached)}. Medians over seeds."
    )


def tabular_optimum(data: str) -> str:
    """The same of a table instead of the network, with an exact expectation; takes seconds."""
    reached = [
        f"{oracle_r2(DISTRIBUTIONS[data], beta, CELLS):.6f} at {beta}" for beta in TABULAR_BETAS
    ]
    return (
        f"{DATA[data]}: a table of {CELLS} cells a side, its expected loss summed exactly and "
        f"minimised, has R² {listed(reached)}."
    )
