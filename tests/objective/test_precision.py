"""Float32 keeps its digits where GradScale runs from nothing to one, whatever offset f has."""

from __future__ import annotations

from decimal import Decimal

import pytest
import torch

from ebmguard.objective import coefficients, contrastive_loss, grad_scale, weights
from tests.objective import oracles
from tests.objective.oracles import VARIANTS, both_slopes, decimals, relative_error, slopes

TOLERANCE = 1e-5
MARGINS = [-40, -30, -17, -8, -1, 0, 1, 8, 17, 30, 40]  # S - β* f⁺


def _float32_energies(margin, beta, offset, *, n=6, m=16, spread=3.0):
    """Positives around one margin, rounded to float32 together with the offset."""
    rng = torch.Generator().manual_seed(abs(margin))
    neg = spread * torch.randn(m, generator=rng, dtype=torch.float64) / abs(beta)
    log_sum = torch.logsumexp(beta * neg, 0)
    near = margin + 0.01 * torch.randn(n, generator=rng, dtype=torch.float64)
    pos = (log_sum - near) / beta
    pos, neg = ((f + offset).float() for f in (pos, neg))
    return pos.requires_grad_(), neg.requires_grad_()


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e3, 3e4])
@pytest.mark.parametrize("beta", [0.5, 2.0, 0.1, -0.5, -2.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_keeps_five_digits_over_the_whole_range(variant, beta, offset):
    for margin in MARGINS:
        pos, neg = _float32_energies(margin, beta, offset)
        # The oracle's exponent is the one that float32 can hold.
        exponent = Decimal(torch.tensor(beta).item())
        expected = oracles.gradient(decimals(pos), decimals(neg), exponent, variant)
        for found in both_slopes(pos, neg, beta, variant=variant):
            for side, oracle in zip(found, expected, strict=True):
                assert side.dtype == torch.float32
                assert relative_error(side, oracle) < TOLERANCE, margin
            size = found[1].double().sum()
            assert abs(found[0].double().sum() + size) <= 1e-5 * size, margin


@pytest.mark.parametrize("beta", [0.5, -0.5])
def test_grad_scale_keeps_five_digits_where_one_minus_sigmoid_has_none(beta):
    for margin in MARGINS:
        pos, neg = _float32_energies(margin, beta, 1e3)
        expected = oracles.grad_scale(decimals(pos), decimals(neg), Decimal(beta))
        found = grad_scale(pos, neg, beta).detach().reshape(1)
        assert relative_error(found, [expected]) < TOLERANCE
    pos, neg = _float32_energies(-40, beta, 0.0)
    naive = (1 - torch.sigmoid(beta * pos - torch.logsumexp(beta * neg, 0))).mean()
    assert naive == 0, "the textbook form is expected to have lost everything here"


def test_loss_value_keeps_five_digits_where_the_two_terms_cancel():
    for margin in (-40, -20, 0, 20, 40):
        pos, neg = _float32_energies(margin, 0.5, 0.0)
        exact = oracles.loss(decimals(pos), decimals(neg), Decimal("0.5"), "default")
        found = contrastive_loss(pos, neg, 0.5).detach().reshape(1)
        assert relative_error(found, [exact]) < TOLERANCE


@pytest.mark.parametrize("shape", [None, (), (1,)], ids=["float", "0-dim", "ensemble"])
@pytest.mark.parametrize("beta", [1.0, -1.0])
def test_a_negative_far_from_the_ones_that_count_costs_no_digits(beta, shape):
    # Energies are exact in float32; only an unlucky shift could round their differences.
    near = torch.tensor([0.125 + 2.0**-20, 0.25 + 2.0**-19, 0.5 + 2.0**-20])
    far = torch.tensor([-30_000.0 * beta])
    neg = torch.cat([near, far]).requires_grad_()
    pos = torch.tensor([0.375 + 2.0**-20, 8 * beta]).requires_grad_()
    expected = oracles.gradient(decimals(pos), decimals(neg), Decimal(beta), "default")
    given = beta if shape is None else torch.full(shape, beta)
    models = (pos.expand(1, -1), neg.expand(1, -1)) if shape == (1,) else (pos, neg)
    autograd = slopes(contrastive_loss(*models, given), pos, neg)
    for found in (autograd, coefficients(*models, given)):
        assert relative_error(found[0].flatten(), expected[0]) < 1e-6
        assert relative_error(found[1].flatten()[:3], expected[1][:3]) < 1e-6
    exact = oracles.weights(decimals(neg), Decimal(beta))
    assert relative_error(weights(models[1], given).detach().flatten()[:3], exact[:3]) < 1e-6


@pytest.mark.parametrize("beta", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([-0.5])])
def test_tensor_exponents_keep_the_digits_too(beta):
    value = beta.reshape(-1)[0].item()
    for margin in (-40, 0, 40):
        pos, neg = _float32_energies(margin, value, 1e3)
        models = [f.reshape(*beta.shape, -1) for f in (pos, neg)]
        found = slopes(contrastive_loss(models[0], models[1], beta), pos, neg)
        expected = oracles.gradient(decimals(pos), decimals(neg), Decimal(value), "default")
        for side, oracle in zip(found, expected, strict=True):
            assert relative_error(side, oracle) < TOLERANCE
