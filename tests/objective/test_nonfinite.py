"""Samples that are not finite, or as good as infinite, are left out and leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard.objective import (
    contrastive_loss,
    grad_scale,
    positive_weights,
    usable,
    weights,
)
from tests.objective.oracles import (
    OF_CLASSES,
    VARIANTS,
    both_slopes,
    energies,
    proposal,
    slopes,
)

BAD = [torch.nan, torch.inf, -6e30]
BAD_POS, BAD_NEG = (1, 5), (0, 3)  # one in each half of the positives
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
# The only negative of class 2 is one of the bad ones.
LABELS = torch.tensor([0, 0, 1, 2, 1, 0, 0, 1]), torch.tensor([0, 1, 0, 2, 1])


@pytest.fixture(autouse=True)
def _anomaly_mode():
    """Not even inside the backward pass may a NaN turn up."""
    with torch.autograd.set_detect_anomaly(True):
        yield


def _with_bad(f, where, bad):
    broken = f.detach().clone()
    broken[list(where)] = bad
    return broken.requires_grad_()


def _kept(f, where):
    return torch.tensor([index not in where for index in range(len(f))])


def _as_without(given, clean, beta, kept, variant, tolerance=1e-13, **options):
    """Whether a call with samples that are not usable is the call without them, weights too."""
    options["variant"] = variant
    loss = contrastive_loss(given[0], given[1], beta, **options)
    less: dict[str, Any] = {
        name: tuple(x[part] for x, part in zip(pair, kept, strict=True))
        for name, pair in options.items()
        if name != "variant"
    }
    sides = [f[part] for f, part in zip(clean, kept, strict=True)]
    right = contrastive_loss(sides[0], sides[1], beta, variant=variant, **less)
    torch.testing.assert_close(loss, right, rtol=tolerance, atol=1e-15)
    expected = slopes(right, *clean)
    for found in both_slopes(given[0], given[1], beta, **options):
        for side, oracle, part in zip(found, expected, kept, strict=True):
            torch.testing.assert_close(side, oracle, rtol=tolerance, atol=1e-15)
            assert not side[~part].any()
    if "groups" not in options:
        ours, theirs = (
            (
                weights(f[1], beta, log_q=q and q[1]),
                positive_weights(f[0], f[1], beta, log_q=q),
                grad_scale(f[0], f[1], beta, log_q=q),
            )
            for f, q in ((given, options.get("log_q")), (sides, less.get("log_q")))
        )
        of_kept = ours[0][kept[1]], ours[1][kept[0]], ours[2]
        torch.testing.assert_close(of_kept, theirs, rtol=tolerance, atol=1e-15)
        assert not ours[0][~kept[1]].any()
        assert ours[1][~kept[0]].isnan().all()


@pytest.mark.parametrize("bad", BAD)
@EVERY_VARIANT
def test_equals_the_call_without_them(variant, bad):
    clean = energies(8, 5)
    betas: list[Any] = [0.5, -0.5, torch.tensor(0.5), torch.tensor(0.0)]
    for bad_pos, bad_neg, used in (
        (BAD_POS, BAD_NEG, betas),
        (BAD_POS, (), betas[:1]),
        ((), BAD_NEG, betas[:1]),
    ):
        given = _with_bad(clean[0], bad_pos, bad), _with_bad(clean[1], bad_neg, bad)
        kept = _kept(clean[0], bad_pos), _kept(clean[1], bad_neg)
        for beta in used:
            _as_without(given, clean, beta, kept, variant)
    if variant in OF_CLASSES:
        given = _with_bad(clean[0], BAD_POS, bad), _with_bad(clean[1], BAD_NEG, bad)
        kept = _kept(clean[0], BAD_POS), _kept(clean[1], BAD_NEG)
        _as_without(given, clean, 0.5, kept, variant, groups=LABELS)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, 3e30])
@EVERY_VARIANT
def test_a_log_density_that_is_not_finite_leaves_its_sample_out(variant, bad):
    clean = energies(8, 5)
    q_pos, q_neg = (q.clone() for q in proposal(8, 5))
    q_pos[list(BAD_POS)], q_neg[list(BAD_NEG)] = bad, bad
    kept = _kept(q_pos, BAD_POS), _kept(q_neg, BAD_NEG)
    log_q = q_pos, q_neg
    for beta in (0.5, -0.5, torch.tensor(0.5)):
        _as_without(clean, clean, beta, kept, variant, 1e-12, log_q=log_q)
    lost = torch.full((5,), bad, dtype=torch.float64)
    assert contrastive_loss(*clean, 0.5, variant=variant, log_q=(q_pos, lost)) == 0
    for found in both_slopes(*clean, 0.5, variant=variant, log_q=(q_pos, lost)):
        assert not any(side.any() for side in found)


@pytest.mark.parametrize("empty", ["pos", "neg", "both"])
@EVERY_VARIANT
def test_an_empty_side_contributes_exactly_nothing(variant, empty):
    for dtype in (torch.float16, torch.float64):
        pos, neg = energies(4, 3, dtype=dtype)
        pos = _with_bad(pos, range(4) if empty != "neg" else (), torch.nan)
        neg = _with_bad(neg, range(3) if empty != "pos" else (), torch.inf)
        for beta in (0.5, torch.tensor(-2.0), torch.tensor(0.0)):
            assert contrastive_loss(pos, neg, beta, variant=variant) == 0
            for found in both_slopes(pos, neg, beta, variant=variant):
                assert all((side == 0).all() for side in found)
        if empty != "pos":
            assert not weights(neg, 0.5).any()
        assert grad_scale(pos, neg, 0.5) == 0


@EVERY_VARIANT
def test_one_bad_head_leaves_its_sample_out(variant):
    pos, neg = (f.detach() for f in energies(8, 5, heads=(2,)))
    clean = contrastive_loss(pos[[0, 2, 3, 4, 6, 7]], neg[[0, 1, 3, 4]], 0.5, variant=variant)
    for bad in BAD:
        pos_b, neg_b = pos.clone(), neg.clone()
        pos_b[[1, 5], 1], neg_b[2, 0] = bad, bad
        pos_b, neg_b = pos_b.requires_grad_(), neg_b.requires_grad_()
        loss = contrastive_loss(pos_b, neg_b, 0.5, variant=variant)
        torch.testing.assert_close(loss, clean, rtol=1e-13, atol=0)
        found = slopes(loss, pos_b, neg_b)
        assert not found[0][[1, 5]].any()
        assert not found[1][2].any()
        assert all(side.isfinite().all() for side in found)


@EVERY_VARIANT
def test_second_derivatives_stay_finite(variant):
    for bad in BAD:
        pos, neg = energies(8, 5)
        pos, neg = _with_bad(pos, BAD_POS, bad), _with_bad(neg, BAD_NEG, bad)
        loss = contrastive_loss(pos, neg, 0.5, variant=variant)
        first = torch.autograd.grad(loss, (pos, neg), create_graph=True)
        (second,) = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), neg)
        assert second.isfinite().all()
        assert second.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_standard_loss_hides_nothing(bad):
    pos, neg = energies(4, 3)
    assert not contrastive_loss(pos, _with_bad(neg, (0,), bad), 0.0).isfinite()


# -- how far energies and log-densities may go ---------------------------------------------------


@EVERY_VARIANT
def test_the_largest_energies_that_count_give_finite_results(variant):
    for dtype in (torch.float32, torch.float64):
        for beta in (0.5, -0.5, 1e-3, 1e3):
            edge = 0.99e30 / abs(beta)
            pos = torch.tensor([edge, -edge, 0.0, 1.0], dtype=dtype, requires_grad=True)
            neg = torch.tensor([-edge, edge, 2.0], dtype=dtype, requires_grad=True)
            loss = contrastive_loss(pos, neg, beta, variant=variant)
            assert loss.isfinite()
            assert all(side.isfinite().all() for side in slopes(loss, pos, neg))
            assert weights(neg, beta).tolist() == ([0, 1, 0] if beta > 0 else [1, 0, 0])


def test_the_output_scale_of_a_class_counts_for_how_far_its_positives_may_go():
    pos = torch.tensor([5e29, 1.0], dtype=torch.float64, requires_grad=True)
    neg = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2)
    found = contrastive_loss(pos, neg, 1.0, groups=(y, y, torch.full((2,), 4.0)))
    alone = contrastive_loss(pos[1:], neg, 1.0, groups=(y[1:], y, torch.full((1,), 4.0)))
    torch.testing.assert_close(found, alone, rtol=1e-14, atol=0)
    assert slopes(found, pos)[0][0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_usable_is_the_policy_value_by_value(dtype):
    values = [0.0, 1.0, -9e29, 9e29, -2e30, 2e30, torch.inf, -torch.inf, torch.nan, 3e34, 5e34]
    f = torch.tensor(values, dtype=dtype)
    zero = torch.zeros_like(f)
    double = dtype == torch.float64
    for beta, policy in {
        1.0: [True] * 4 + [False] * 7,
        -0.25: [True] * 6 + [False] * 5,
        # A tiny β* leaves the bound on the energies themselves, which only float32 needs.
        1e-9: [True] * 6 + [False] * 3 + [True, double],
    }.items():
        assert usable(f, beta).tolist() == policy
        assert usable(f, torch.tensor(beta, dtype=dtype)).tolist() == policy
    # Log q by itself, and by what the loss divides by β*; where β* is 0 it does not count.
    for form in (float, torch.tensor):
        assert usable(zero, form(1.0), f).tolist() == [True] * 4 + [False] * 7
        assert usable(zero, form(1e-9), f).tolist() == [True] * 2 + [double] * 2 + [False] * 7
        assert usable(zero, form(1e-36), f).all()


@pytest.mark.parametrize("zero", [0.0, 1e-36])
def test_where_the_exponent_is_zero_a_lost_log_density_is_not_looked_at(zero):
    pos, neg = energies(4, 3)
    lost = torch.full((4,), torch.nan), torch.full((3,), torch.nan)
    found = contrastive_loss(pos, neg, torch.tensor(zero), log_q=lost)
    torch.testing.assert_close(found, neg.mean() - pos.mean())
    for function in (positive_weights, grad_scale):
        given: Any = function(pos, neg, torch.tensor(0.0), log_q=lost)
        assert torch.equal(given, function(pos, neg, 0.0))
    assert torch.equal(weights(neg, torch.tensor(0.0), log_q=lost[1]), weights(neg, 0.0))


@EVERY_VARIANT
def test_a_log_density_too_large_for_the_loss_leaves_its_sample_out(variant):
    """The loss divides by β*: log q = -9e29 at β* = 1e-9 would make it infinite in float32."""
    pos, neg = (f.detach().float().requires_grad_() for f in energies(6, 7))
    q_pos, q_neg = torch.zeros(6), torch.zeros(7)
    q_pos[1], q_neg[2] = -9e29, 9e29
    for beta in (1e-9, -1e-9, torch.tensor(1e-9)):
        loss = contrastive_loss(pos, neg, beta, variant=variant, log_q=(q_pos, q_neg))
        assert loss.isfinite()
        found = slopes(loss, pos, neg)
        assert torch.equal(found[0] == 0, q_pos != 0)
        assert torch.equal(found[1] == 0, q_neg != 0)
