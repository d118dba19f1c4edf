"""Energies that are not finite, or as good as infinite, are left out and leave no trace."""

from __future__ import annotations

import pytest
import torch

from ebmguard.objective import (
    contrastive_loss,
    grad_scale,
    positive_weights,
    usable,
    weights,
)
from tests.objective.oracles import VARIANTS, both_slopes, energies, slopes

BAD = [torch.nan, torch.inf, -torch.inf, 3e30, -3e30]
BAD_POS, BAD_NEG = (1, 5), (0, 3)  # one in each half of the positives
EVERY_BAD = pytest.mark.parametrize("bad", BAD)
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(autouse=True)
def _anomaly_mode():
    """Not even inside the backward pass may a NaN turn up."""
    with torch.autograd.set_detect_anomaly(True):
        yield


def _with_bad(f, where, bad):
    broken = f.detach().clone()
    broken[..., list(where)] = bad
    return broken.requires_grad_()


def _kept(f, where):
    return torch.tensor([index not in where for index in range(f.shape[-1])])


@EVERY_BAD
@EVERY_VARIANT
@pytest.mark.parametrize("sides", ["pos", "neg", "both"])
@pytest.mark.parametrize("beta", [0.5, -0.5, torch.tensor(0.5), torch.tensor(0.0)], ids=str)
def test_equals_the_call_without_them(variant, bad, sides, beta):
    pos, neg = energies(8, 5)
    bad_pos = BAD_POS if sides != "neg" else ()
    bad_neg = BAD_NEG if sides != "pos" else ()
    pos_b, neg_b = _with_bad(pos, bad_pos, 2 * bad), _with_bad(neg, bad_neg, 2 * bad)
    in_pos, in_neg = _kept(pos, bad_pos), _kept(neg, bad_neg)
    loss = contrastive_loss(pos_b, neg_b, beta, variant=variant)
    clean = contrastive_loss(pos[in_pos], neg[in_neg], beta, variant=variant)
    torch.testing.assert_close(loss, clean, rtol=1e-13, atol=1e-15)
    expected = slopes(clean, pos, neg)
    for found in both_slopes(pos_b, neg_b, beta, variant=variant):
        for side, oracle, kept in zip(found, expected, (in_pos, in_neg), strict=True):
            torch.testing.assert_close(side, oracle, rtol=1e-13, atol=1e-15)
            assert not side[~kept].any()


@EVERY_BAD
def test_weights_leave_them_out(bad):
    pos, neg = energies(8, 5)
    pos_b, neg_b = _with_bad(pos, BAD_POS, 2 * bad), _with_bad(neg, BAD_NEG, 2 * bad)
    in_pos, in_neg = _kept(pos, BAD_POS), _kept(neg, BAD_NEG)
    w = weights(neg_b, 0.5)
    torch.testing.assert_close(w[in_neg], weights(neg[in_neg], 0.5), rtol=1e-13, atol=0)
    assert not w[~in_neg].any()
    w_pos = positive_weights(pos_b, neg_b, 0.5)
    expected = positive_weights(pos[in_pos], neg[in_neg], 0.5)
    torch.testing.assert_close(w_pos[in_pos], expected, rtol=1e-13, atol=0)
    assert w_pos[~in_pos].isnan().all()
    expected = grad_scale(pos[in_pos], neg[in_neg], 0.5)
    torch.testing.assert_close(grad_scale(pos_b, neg_b, 0.5), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.5, -2.0, torch.tensor(0.5), torch.tensor(0.0)], ids=str)
@pytest.mark.parametrize("empty", ["pos", "neg", "both"])
@EVERY_VARIANT
def test_an_empty_side_contributes_exactly_nothing(variant, empty, beta, dtype):
    pos, neg = energies(4, 3, dtype=dtype)
    pos = _with_bad(pos, range(4) if empty != "neg" else (), torch.nan)
    neg = _with_bad(neg, range(3) if empty != "pos" else (), torch.inf)
    loss = contrastive_loss(pos, neg, beta, variant=variant)
    assert loss == 0
    for found in both_slopes(pos, neg, beta, variant=variant):
        assert all((side == 0).all() for side in found)


@pytest.mark.parametrize("half", [(0, 1), (2, 3)], ids=["first", "second"])
def test_true_with_an_empty_half_contributes_nothing(half):
    pos, neg = energies(4, 3)
    pos = _with_bad(pos, half, torch.nan)
    loss = contrastive_loss(pos, neg, 0.5, variant="true")
    assert loss == 0
    for found in both_slopes(pos, neg, 0.5, variant="true"):
        assert all((side == 0).all() for side in found)
    # The others do not care which half is left, and nor does β* = 0, which has no halves.
    assert contrastive_loss(pos, neg, 0.5, variant="batch") != 0
    left = pos[[index for index in range(4) if index not in half]]
    standard = contrastive_loss(pos, neg, torch.tensor(0.0), variant="true")
    torch.testing.assert_close(standard, neg.mean() - left.mean())


def test_no_usable_negative_has_no_weights():
    pos, _ = energies(4, 3)
    broken = torch.full((3,), torch.nan, dtype=torch.float64)
    assert torch.equal(weights(broken, 0.5), torch.zeros(3, dtype=torch.float64))
    assert grad_scale(pos, broken, 0.5) == 0


@EVERY_VARIANT
def test_one_broken_member_does_not_touch_the_others(variant):
    betas = torch.tensor([0.5, 0.5, 0.0, 1.0])
    pos = torch.stack([energies(4, 3, seed=k)[0].detach() for k in range(4)])
    neg = torch.stack([energies(4, 3, seed=k)[1].detach() for k in range(4)])
    broken = neg.clone()
    broken[0], broken[3, 1] = torch.nan, -torch.inf
    pos, broken = pos.requires_grad_(), broken.requires_grad_()
    loss = contrastive_loss(pos, broken, betas, variant=variant)
    found = slopes(loss, pos, broken)
    assert loss[0] == 0
    assert all((side[0] == 0).all() for side in found)
    for k, kept in ((1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 2])):
        alone = contrastive_loss(pos[k], neg[k, kept], betas[k].item(), variant=variant)
        torch.testing.assert_close(loss[k], alone, rtol=1e-13, atol=0)
        torch.testing.assert_close(found[0][k], slopes(alone, pos)[0][k], rtol=1e-13, atol=1e-16)


@EVERY_BAD
@EVERY_VARIANT
def test_one_bad_head_leaves_its_sample_out(variant, bad):
    pos, neg = energies(16, 10)
    pos, neg = (f.detach().reshape(-1, 2) for f in (pos, neg))
    pos_b, neg_b = pos.clone(), neg.clone()
    pos_b[[1, 5], 1], neg_b[2, 0] = 2 * bad, 2 * bad
    pos_b, neg_b = pos_b.requires_grad_(), neg_b.requires_grad_()
    loss = contrastive_loss(pos_b, neg_b, 0.5, variant=variant)
    clean = contrastive_loss(pos[[0, 2, 3, 4, 6, 7]], neg[[0, 1, 3, 4]], 0.5, variant=variant)
    torch.testing.assert_close(loss, clean, rtol=1e-13, atol=0)
    found = slopes(loss, pos_b, neg_b)
    assert not found[0][[1, 5]].any()
    assert not found[1][2].any()
    assert all(side.isfinite().all() for side in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EVERY_VARIANT
def test_the_largest_energies_that_count_give_finite_results(variant, dtype):
    for beta in (0.5, -0.5, 1e-3, 1e3):
        edge = 0.99e30 / abs(beta)
        pos = torch.tensor([edge, -edge, 0.0, 1.0], dtype=dtype, requires_grad=True)
        neg = torch.tensor([-edge, edge, 2.0], dtype=dtype, requires_grad=True)
        loss = contrastive_loss(pos, neg, beta, variant=variant)
        found = slopes(loss, pos, neg)
        assert loss.isfinite()
        assert all(side.isfinite().all() for side in found)
        assert weights(neg, beta).sum() == 1
        top = 1 if beta > 0 else 0
        assert weights(neg, beta)[top] == 1


def test_energies_near_the_end_of_float32_are_left_out_where_their_sums_would_overflow():
    pos = torch.tensor([3e38, 1.0], requires_grad=True)
    neg = torch.tensor([-3e38, 0.0], requires_grad=True)
    for beta in (1e-20, torch.tensor(1e-20), torch.tensor(0.0)):
        loss = contrastive_loss(pos, neg, beta, variant="no_pos")
        found = slopes(loss, pos, neg)
        torch.testing.assert_close(found[0], torch.tensor([0.0, -1.0]))
        torch.testing.assert_close(found[1], torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_standard_loss_hides_nothing(bad):
    pos, neg = energies(4, 3)
    assert not contrastive_loss(pos, _with_bad(neg, (0,), bad), 0.0).isfinite()


@EVERY_BAD
@EVERY_VARIANT
def test_second_derivatives_stay_finite(variant, bad):
    pos, neg = energies(8, 5)
    pos, neg = _with_bad(pos, BAD_POS, 2 * bad), _with_bad(neg, BAD_NEG, 2 * bad)
    loss = contrastive_loss(pos, neg, 0.5, variant=variant)
    first = torch.autograd.grad(loss, (pos, neg), create_graph=True)
    (second,) = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), neg)
    assert second.isfinite().all()
    assert second.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_usable_is_the_policy_value_by_value(dtype):
    values = [0.0, 1.0, -9e29, 9e29, -2e30, 2e30, torch.inf, -torch.inf, torch.nan, 3e34, 5e34]
    f = torch.tensor(values, dtype=dtype)
    assert usable(f, 1.0).tolist() == [True] * 4 + [False] * 7
    assert usable(f, -0.25).tolist() == [True] * 6 + [False] * 5
    # A tiny β* leaves the bound on the energies themselves, which only float32 needs.
    assert usable(f, 1e-9).tolist() == [True] * 6 + [False] * 3 + [True, dtype == torch.float64]
    per_model = usable(f.expand(2, -1), torch.tensor([[1.0], [-0.25]]))
    assert torch.equal(per_model, torch.stack([usable(f, 1.0), usable(f, -0.25)]))
