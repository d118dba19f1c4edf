"""Shares of the samplers of a mixture, against sums written out over their samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard.diagnostics import mixture_sums, named_mixture
from ebmguard.objective import Terms

NAMES = "good", "broken", "none"
WHOSE = torch.tensor([[1] * 5 + [0] * 3, [0] * 5 + [1] * 3, [0] * 8]).bool()


def draw() -> tuple[Tensor, Tensor]:
    return torch.randn(6, dtype=torch.float64), 2 * torch.randn(8, dtype=torch.float64)


def shares(
    pos: Tensor, neg: Tensor, star: float, *more: Any, whose: Tensor = WHOSE
) -> tuple[list[float], list[float]]:
    """Weights and gaps; those of a second exponent are the same as alone."""
    column = torch.tensor([[star], [0.7]], dtype=pos.dtype)
    terms = Terms.of(pos, neg, column, *more)
    names = NAMES[: len(whose)]
    found, other = named_mixture(mixture_sums(terms, neg, whose).tolist(), names, pos.mean().item())
    (again,) = named_mixture(
        mixture_sums(Terms.of(pos, neg, column[1:], *more), neg, whose).tolist(), names, 0.0
    )
    assert other == pytest.approx({name: again[name] for name in other}, rel=1e-12, nan_ok=True)
    return [[found[f"mixture/{x}/{tag}"] for x in names] for tag in ("weight", "energy_gap")]  # type: ignore[return-value]


@pytest.mark.parametrize("star", [0.0, 0.5, 3.0, -1.0])
@pytest.mark.parametrize("has_proposal", [False, True])
def test_shares_and_gaps_are_the_sums_over_the_parts(star, has_proposal):
    pos, neg = draw()
    log_q = draw() if has_proposal else None
    mass = (star * neg - (log_q[1] if log_q and star else 0.0)).exp()
    weights, gaps = shares(pos, neg, star, None, log_q)
    expected = [mass[:5].sum() / mass.sum(), mass[5:].sum() / mass.sum(), 0.0]
    assert weights == pytest.approx([float(x) for x in expected], rel=1e-12)
    expected = [pos.mean() - neg[:5].mean(), pos.mean() - neg[5:].mean(), math.nan]
    assert gaps == pytest.approx([float(x) for x in expected], rel=1e-12, nan_ok=True)


def test_classes_share_within_each_positive():
    """By hand: each positive weighs the negatives of its class; the one of class 7 has none."""
    pos, neg = torch.zeros(4), torch.tensor([0.0, math.log(3.0), 5.0, 1.0])
    labels = torch.tensor([0, 0, 1, 7]), torch.tensor([0, 0, 1, 2])
    whose = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]).bool()
    weights, _ = shares(pos, neg, 1.0, labels, whose=whose)
    assert weights == pytest.approx([(1 / 4 + 1 / 4) / 3, (3 / 4 + 3 / 4 + 1) / 3, 0.0])


def test_a_sampler_that_lost_its_energies_weighs_nothing():
    pos, neg = draw()
    neg[5:] = torch.nan
    weights, gaps = shares(pos, neg, 0.5)
    assert weights == pytest.approx([1.0, 0.0, 0.0])
    assert [math.isnan(x) for x in gaps] == [False, True, True]
    neg[:] = torch.nan
    assert all(math.isnan(x) for x in shares(pos, neg, 0.5)[0])


def test_shares_are_known_where_grad_scale_is_too_small_for_a_float():
    pos, neg = torch.full((3,), 500.0), torch.tensor([0.0, 0.0, math.log(2.0)])
    whose = torch.tensor([[1, 1, 0], [0, 0, 1]]).bool()
    assert shares(pos, neg, 1.0, whose=whose)[0] == pytest.approx([0.5, 0.5])
