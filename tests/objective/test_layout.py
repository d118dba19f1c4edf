"""Heads, ensembles over model dimensions, and dtypes."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import pytest
import torch

from ebmguard.objective import (
    coefficients,
    contrastive_loss,
    grad_scale,
    positive_weights,
    weights,
)
from tests.objective import oracles
from tests.objective.oracles import VARIANTS, decimals, energies, relative_error, slopes

EXACT: dict[str, Any] = {"rtol": 1e-13, "atol": 0.0}


def _heads(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("heads", [(1,), (3,), (2, 2), (3, 1, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_against_energies_reduced_by_hand(variant, heads, reduce):
    pos, neg = _heads(4, *heads), _heads(5, *heads, seed=1)
    by_hand = [
        [Decimal(sum(map(Decimal, f.flatten().tolist()))) for f in side] for side in (pos, neg)
    ]
    count = torch.Size(heads).numel()
    share = Decimal(1) / count if reduce == "mean" else Decimal(1)
    by_hand = [[f * share for f in side] for side in by_hand]
    expected = oracles.gradient(by_hand[0], by_hand[1], Decimal("0.5"), variant)
    found = slopes(contrastive_loss(pos, neg, 0.5, variant=variant, reduce=reduce), pos, neg)
    closed = coefficients(pos, neg, 0.5, variant=variant, reduce=reduce)
    for side, per_sample, oracle in zip(found, closed, expected, strict=True):
        assert side.shape[1:] == heads
        assert relative_error(per_sample, oracle) < 1e-12
        # Every head of a sample gets that sample's slope, times the head's share.
        for head in side.flatten(1).T:
            assert relative_error(head, [value * share for value in oracle]) < 1e-12


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("heads", [(), (1,), (3,), (2, 2)], ids=str)
def test_heads_at_zero_exponent(heads, reduce):
    pos, neg = _heads(4, *heads), _heads(5, *heads, seed=1)
    expected = neg.flatten(1).sum(1).mean() if heads else neg.mean()
    expected = expected - (pos.flatten(1).sum(1).mean() if heads else pos.mean())
    if reduce == "mean":
        expected = expected / torch.Size(heads).numel()
    for beta in (0.0, torch.tensor(0.0)):
        torch.testing.assert_close(contrastive_loss(pos, neg, beta, reduce=reduce), expected)


def test_zero_exponent_takes_a_column_as_the_callers_mean_does_bit_for_bit():
    pos, neg = _heads(64, 1), _heads(48, 1, seed=1)
    assert torch.equal(contrastive_loss(pos, neg, 0.0), neg.mean() - pos.mean())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_heads_in_the_weights(reduce):
    pos, neg = _heads(4, 3), _heads(5, 3, seed=1)
    p, n = (getattr(f, reduce)(1) for f in (pos, neg))
    assert torch.equal(weights(neg, 0.5, reduce=reduce), weights(n, 0.5))
    found = positive_weights(pos, neg, 0.5, reduce=reduce)
    assert torch.equal(found, positive_weights(p, n, 0.5))
    assert torch.equal(grad_scale(pos, neg, 0.5, reduce=reduce), grad_scale(p, n, 0.5))


ENSEMBLES = [
    torch.tensor([0.5, -1.0, 2.0]),
    torch.tensor([0.0, 0.5, 0.0]),
    torch.tensor([0.0]),
    torch.tensor([[0.5, 0.0, 1.0], [-2.0, 4.0, 1e-3]]),
]


@pytest.mark.parametrize("betas", ENSEMBLES, ids=lambda b: str(b.tolist()))
@pytest.mark.parametrize("variant", VARIANTS)
def test_ensemble_equals_each_member_alone(variant, betas):
    pos, neg = _heads(*betas.shape, 6), _heads(*betas.shape, 4, seed=1)
    loss = contrastive_loss(pos, neg, betas, variant=variant)
    assert loss.shape == betas.shape
    found = slopes(loss, pos, neg)
    closed = coefficients(pos, neg, betas, variant=variant)
    w, w_pos = weights(neg, betas), positive_weights(pos, neg, betas)
    scale = grad_scale(pos, neg, betas)
    assert scale.shape == betas.shape
    for k in itertools.product(*map(range, betas.shape)):
        beta, alone = betas[k].item(), (pos[k], neg[k])
        exact = decimals(pos[k]), decimals(neg[k]), Decimal(beta)
        expected = oracles.gradient(*exact, variant)
        value = oracles.loss(*exact, variant)
        assert loss[k].item() == pytest.approx(float(value), rel=1e-12)
        for side in range(2):
            assert relative_error(found[side][k], expected[side]) < 1e-12
            assert relative_error(closed[side][k], expected[side]) < 1e-12
        torch.testing.assert_close(w[k], weights(neg[k], beta), **EXACT)
        torch.testing.assert_close(w_pos[k], positive_weights(*alone, beta), **EXACT)
        torch.testing.assert_close(scale[k], grad_scale(*alone, beta), **EXACT)


@pytest.mark.parametrize("variant", VARIANTS)
def test_zeros_inside_a_tensor_exponent_bring_no_nan_into_any_gradient(variant):
    # At β* = 1, where the zero entry is computed, these energies are far beyond exp's range.
    betas = torch.tensor([0.0, 1e-4])
    pos = torch.tensor([[1e8, -1e8], [3.0, 1.0]], requires_grad=True)
    neg = torch.tensor([[-1e8, 1e8, 0.0], [2.0, 0.0, 1.0]], requires_grad=True)
    found = slopes(contrastive_loss(pos, neg, betas, variant=variant), pos, neg)
    torch.testing.assert_close(found[0][0], torch.tensor([-0.5, -0.5]))
    torch.testing.assert_close(found[1][0], torch.full((3,), 1 / 3))
    assert all(side.isfinite().all() for side in found)


def test_one_exponent_tensor_of_one_dimension_is_an_ensemble_of_one():
    pos, neg = _heads(1, 4), _heads(1, 3, seed=1)
    loss = contrastive_loss(pos, neg, torch.tensor([0.5]))
    assert loss.shape == (1,)
    torch.testing.assert_close(loss[0], contrastive_loss(pos[0], neg[0], 0.5), **EXACT)


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_computed_in_float32_at_least_and_gradients_come_back_as_given(given, beta):
    expected = torch.float64 if given == torch.float64 else torch.float32
    pos, neg = energies(4, 3, dtype=given)
    for variant in VARIANTS:
        loss = contrastive_loss(pos, neg, beta, variant=variant)
        assert loss.dtype == expected
        assert all(side.dtype == given for side in slopes(loss, pos, neg))
        assert all(c.dtype == expected for c in coefficients(pos, neg, beta, variant=variant))
    assert weights(neg, beta).dtype == grad_scale(pos, neg, beta).dtype == expected


def test_half_precision_sums_its_heads_in_float32():
    pos = torch.full((2, 4), 30_000.0, dtype=torch.float16, requires_grad=True)
    neg = torch.full((3, 4), 30_000.0, dtype=torch.float16, requires_grad=True)
    loss = contrastive_loss(pos, neg, 1.0)
    torch.testing.assert_close(loss, torch.tensor(4.0).log())


def test_the_two_sides_may_have_different_dtypes():
    pos, neg = energies(4, 3)
    low = neg.detach().bfloat16().requires_grad_()
    loss = contrastive_loss(pos, low, 0.5)
    torch.testing.assert_close(loss, contrastive_loss(pos, low.double(), 0.5))
    found = slopes(loss, pos, low)
    assert [side.dtype for side in found] == [torch.float64, torch.bfloat16]
