"""Loss, gradient and coefficients in float64 against 80-digit textbook forms."""

from __future__ import annotations

from decimal import Decimal

import pytest
import torch

from ebmguard.objective import (
    contrastive_loss,
    grad_scale,
    positive_weights,
    weights,
)
from tests.objective import oracles
from tests.objective.oracles import (
    VARIANTS,
    both_slopes,
    decimals,
    energies,
    relative_error,
    slopes,
)

TOLERANCE = 1e-12
BETAS = [0.5, 1.0, 3.7, 1e-3, -0.8, -2.5]
SIZES = [(6, 4), (4, 7), (5, 3), (2, 1), (3, 2), (2, 50), (50, 1), (1, 3)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("beta", [0.5, -0.8])
def test_oracle_closed_forms_are_the_slope_of_the_oracle_loss(variant, beta):
    pos, neg = (decimals(f) for f in energies(5, 4))
    closed = oracles.gradient(pos, neg, Decimal(beta), variant)
    numeric = oracles.quotient(pos, neg, Decimal(beta), variant)
    for a, b in zip(closed, numeric, strict=True):
        assert relative_error(a, b) < 1e-30


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [(name, sizes) for name in VARIANTS for sizes in SIZES if name != "true" or sizes[0] > 1],
    ids=str,
)
@pytest.mark.parametrize("beta", BETAS)
def test_gradient_and_coefficients(variant, beta, sizes):
    pos, neg = energies(*sizes)
    expected = oracles.gradient(decimals(pos), decimals(neg), Decimal(beta), variant)
    for found in both_slopes(pos, neg, beta, variant=variant):
        for side, oracle in zip(found, expected, strict=True):
            assert side.dtype == torch.float64
            assert not side.requires_grad
            assert relative_error(side, oracle) < TOLERANCE


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_value(variant, beta):
    pos, neg = energies(6, 4)
    expected = oracles.loss(decimals(pos), decimals(neg), Decimal(beta), variant)
    found = contrastive_loss(pos, neg, beta, variant=variant)
    assert found.shape == ()
    assert found.item() == pytest.approx(float(expected), rel=TOLERANCE)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_weights(beta, sizes):
    pos, neg = energies(*sizes)
    exact = decimals(pos), decimals(neg), Decimal(beta)
    assert relative_error(weights(neg, beta).detach(), oracles.weights(*exact[1:])) < TOLERANCE
    found = positive_weights(pos, neg, beta).detach()
    assert relative_error(found, oracles.positive_weights(*exact)) < TOLERANCE
    scale = grad_scale(pos, neg, beta).detach()
    assert scale.shape == ()
    assert relative_error(scale.reshape(1), [oracles.grad_scale(*exact)]) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_positive_weight_is_what_a_positive_gets_as_one_more_negative(variant):
    pos, neg = energies(4, 5)
    for f, w_pos in zip(pos, positive_weights(pos, neg, 0.7), strict=True):
        joined = weights(torch.cat([neg, f.reshape(1)]), 0.7)
        assert w_pos.item() == pytest.approx(joined[-1].item(), rel=TOLERANCE)


def _as_int_tensor(beta):
    return torch.tensor(int(beta))


def _as_low_precision(beta):
    return torch.tensor(beta, dtype=torch.float32)


@pytest.mark.parametrize(
    "make",
    [float, int, lambda b: torch.tensor(b, dtype=torch.float64), _as_int_tensor, _as_low_precision],
    ids=["float", "int", "0-dim float64", "0-dim int64", "0-dim float32"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_form_of_a_single_exponent_is_the_same(variant, make):
    pos, neg = energies(4, 3)
    reference = contrastive_loss(pos, neg, 2.0, variant=variant)
    found = contrastive_loss(pos, neg, make(2.0), variant=variant)
    assert found.shape == ()
    torch.testing.assert_close(found, reference, rtol=1e-14, atol=0)
    for a, b in zip(slopes(found, pos, neg), slopes(reference, pos, neg), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_exponent_is_the_plain_difference(variant):
    pos, neg = energies(4, 3)
    for beta in (0, 0.0, torch.tensor(0.0), torch.tensor(0)):
        found = contrastive_loss(pos, neg, beta, variant=variant)
        assert found.item() == pytest.approx((neg.mean() - pos.mean()).item(), rel=TOLERANCE)
        for sides in both_slopes(pos, neg, beta, variant=variant):
            torch.testing.assert_close(sides[0], torch.full_like(pos, -1 / 4))
            torch.testing.assert_close(sides[1], torch.full_like(neg, 1 / 3))


def test_zero_exponent_leaves_the_callers_loss_untouched_bit_for_bit():
    pos, neg = energies(7, 5, dtype=torch.float16)
    found = contrastive_loss(pos, neg, 0.0)
    assert found.dtype == torch.float16
    assert torch.equal(found, neg.mean() - pos.mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequence_of_exponents_averages_the_losses(variant):
    pos, neg = energies(4, 3)
    betas = [0.5, 0.0, -1.0, 4.0]
    found = contrastive_loss(pos, neg, betas, variant=variant)
    exact = [oracles.loss(decimals(pos), decimals(neg), Decimal(b), variant) for b in betas]
    assert found.item() == pytest.approx(float(sum(exact) / 4), rel=TOLERANCE)
    sides = [oracles.gradient(decimals(pos), decimals(neg), Decimal(b), variant) for b in betas]
    for k, found_side in enumerate(slopes(found, pos, neg)):
        means = [sum(column) / 4 for column in zip(*(s[k] for s in sides), strict=True)]
        assert relative_error(found_side, means) < TOLERANCE


def test_sequence_through_zero_takes_half_precision_energies():
    pos, neg = energies(4, 3, dtype=torch.float16)
    found = contrastive_loss(pos, neg, (0.0, 1.0))
    assert found.dtype == torch.float32


@pytest.mark.parametrize("beta", [0, 0.0, torch.tensor(0.0)], ids=repr)
def test_weights_at_zero_exponent_are_uniform_whatever_the_energies(beta):
    pos, neg = (100 * f.detach() for f in energies(6, 4))
    torch.testing.assert_close(weights(neg, beta), torch.full_like(neg, 1 / 4))
    torch.testing.assert_close(positive_weights(pos, neg, beta), torch.full_like(pos, 1 / 5))
    torch.testing.assert_close(grad_scale(pos, neg, beta), torch.tensor(4 / 5).double())
    neg[1] = torch.nan  # which leaves three
    torch.testing.assert_close(grad_scale(pos, neg, beta), torch.tensor(3 / 4).double())
