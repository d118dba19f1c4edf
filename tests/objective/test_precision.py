"""Float32 keeps its digits while GradScale runs from 0 to 1, whatever offsets f and log q have."""

from __future__ import annotations

import pytest
import torch

from ebmguard.objective import contrastive_loss, grad_scale, weights
from tests.objective.oracles import (
    VARIANTS,
    both_slopes,
    energies,
    proposal,
    relative_error,
    slopes,
    textbook,
)

TOLERANCE = 1e-5
MARGINS = [-40, -30, -17, -8, -1, 0, 1, 8, 17, 30, 40]  # S - β* f⁺
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def _float32_energies(margin, beta, offset, *, n=6, m=16, spread=3.0):
    """Positives around one margin, rounded to float32 together with the offset."""
    rng = torch.Generator().manual_seed(abs(margin))
    neg = spread * torch.randn(m, generator=rng, dtype=torch.float64) / abs(beta)
    log_sum = torch.logsumexp(beta * neg, 0)
    near = margin + 0.01 * torch.randn(n, generator=rng, dtype=torch.float64)
    pos = (log_sum - near) / beta
    pos, neg = ((f + offset).float() for f in (pos, neg))
    return pos.requires_grad_(), neg.requires_grad_()


def _digits(pos, neg, beta, variant, tolerance, **options):
    """Those of the exact gradient at these float32 numbers."""
    right = textbook(pos, neg, torch.as_tensor(beta).item(), variant, **options)
    for found in both_slopes(pos, neg, beta, variant=variant, **options):
        for side, oracle in zip(found, (right.to_pos, right.to_neg), strict=True):
            assert side.dtype == torch.float32
            assert relative_error(side, oracle) < tolerance


@pytest.mark.parametrize(
    ("beta", "offset"), [(0.5, 1e3), (0.5, 0.0), (2.0, -1e3), (0.1, 3e4), (-0.5, 3e4), (-2.0, 1e3)]
)
@EVERY_VARIANT
def test_gradient_keeps_five_digits_over_the_whole_range(variant, beta, offset):
    for margin in MARGINS:
        pos, neg = _float32_energies(margin, beta, offset)
        # The exponent of the oracle, too, is the one that float32 can hold.
        _digits(pos, neg, torch.tensor(beta), variant, TOLERANCE)
        for to_pos, to_neg in both_slopes(pos, neg, beta, variant=variant):
            size = to_neg.double().sum()
            assert abs(to_pos.double().sum() + size) <= 1e-5 * size, margin


@pytest.mark.parametrize("beta", [0.5, -0.5])
def test_grad_scale_keeps_five_digits_where_one_minus_sigmoid_has_none(beta):
    for margin in MARGINS:
        pos, neg = _float32_energies(margin, beta, 1e3)
        right = textbook(pos, neg, beta).grad_scale
        assert relative_error(grad_scale(pos, neg, beta), right) < TOLERANCE
    pos, neg = _float32_energies(-40, beta, 0.0)
    naive = (1 - torch.sigmoid(beta * pos - torch.logsumexp(beta * neg, 0))).mean()
    assert naive == 0, "the textbook form is expected to have lost everything here"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_value_keeps_its_digits_where_the_two_terms_cancel(dtype):
    for margin in (-40, -20, 0, 20, 40):
        pos, neg = (f.to(dtype) for f in _float32_energies(margin, 0.5, 0.0))
        found = contrastive_loss(pos, neg, 0.5)
        right = textbook(pos, neg, 0.5).loss
        assert relative_error(found, right) < 1e2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("beta", [0.5, 2.0, -0.5])
@EVERY_VARIANT
def test_large_offsets_of_f_and_of_log_q_cost_no_digits(variant, beta):
    """The latter is in the thousands for images, and comes in either precision."""
    pos, neg = ((f.detach() + 3e4).float().requires_grad_() for f in energies(6, 16))
    for dtype in (torch.float32, torch.float64):
        log_q = tuple((q - 1e5).to(dtype) for q in proposal(6, 16))
        _digits(pos, neg, beta, variant, TOLERANCE, log_q=log_q)


@EVERY_VARIANT
def test_a_negative_that_q_accounts_for_takes_no_digits_from_the_others(variant):
    """Of the largest f by far, and of no weight: exponents are not relative to that one."""
    pos, neg = (f.detach().float().requires_grad_() for f in energies(6, 8))
    q_pos, q_neg = (q.float() for q in proposal(6, 8))
    far = torch.arange(8) == 3
    high, q_high = torch.where(far, 1e8, neg), torch.where(far, 2e8, q_neg)
    loss = contrastive_loss(pos, high, 0.5, variant=variant, log_q=(q_pos, q_high))
    rest = contrastive_loss(pos, neg[~far], 0.5, variant=variant, log_q=(q_pos, q_neg[~far]))
    torch.testing.assert_close(loss, rest)
    torch.testing.assert_close(slopes(loss, pos, neg), slopes(rest, pos, neg))


def test_log_densities_of_half_precision_are_computed_in_single():
    pos, neg = (f.detach().float() for f in energies(6, 7))
    # Their differences are beyond half precision.
    log_q = torch.full((6,), 6e4).half(), torch.linspace(-6e4, 6e4, 7).half()
    single = log_q[0].float(), log_q[1].float()
    found = contrastive_loss(pos, neg, 0.5, log_q=log_q)
    assert found.isfinite()
    assert torch.equal(found, contrastive_loss(pos, neg, 0.5, log_q=single))


# -- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_computed_in_float32_at_least_and_gradients_come_back_as_given(given):
    expected = torch.float64 if given == torch.float64 else torch.float32
    pos, neg = energies(4, 3, dtype=given)
    for beta in (0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
        for variant in VARIANTS:
            loss = contrastive_loss(pos, neg, beta, variant=variant)
            assert loss.dtype == expected
            assert all(side.dtype == given for side in slopes(loss, pos, neg))
        assert weights(neg, beta).dtype == grad_scale(pos, neg, beta).dtype == expected
