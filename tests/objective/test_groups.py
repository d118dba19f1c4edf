"""Class-conditional chains: every positive against the negatives of its own class."""

from __future__ import annotations

from decimal import Decimal

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.objective import coefficients, contrastive_loss
from tests.objective import oracles
from tests.objective.oracles import both_slopes, decimals, energies, relative_error, slopes

GROUPED = ["default", "no_pos"]
Y_POS = torch.tensor([0, 1, 2, 0, 1, 3])  # class 3 has no negative
Y_NEG = torch.tensor([1, 0, 0, 2, 1, 1, 4])  # class 4 has no positive


SCALES = torch.tensor([0.25, 3.0, 1.5, 2.0, 1.0], dtype=torch.float64)  # of the classes


def _per_class(pos, neg, beta, variant, y_pos=Y_POS, y_neg=Y_NEG, scales=None):
    """Loss and gradient by a loop over classes, each in 80-digit decimals."""
    partnered = [c for c in y_pos.tolist() if c in y_neg.tolist()]
    loss, g_pos, g_neg = Decimal(0), [Decimal(0)] * len(pos), [Decimal(0)] * len(neg)
    for c in sorted(set(partnered)):
        mine, theirs = (y_pos == c).nonzero().flatten(), (y_neg == c).nonzero().flatten()
        share = Decimal(len(mine)) / len(partnered)
        exponent = Decimal(beta) * Decimal(1.0 if scales is None else scales[c].item())
        exact = decimals(pos[mine]), decimals(neg[theirs]), exponent
        loss += share * oracles.loss(*exact, variant)
        sides = oracles.gradient(*exact, variant)
        for total, where, side in ((g_pos, mine, sides[0]), (g_neg, theirs, sides[1])):
            for index, value in zip(where.tolist(), side, strict=True):
                total[index] += share * value
    return loss, (g_pos, g_neg)


@pytest.mark.parametrize("scales", [None, SCALES], ids=["one scale", "a scale of each class"])
@pytest.mark.parametrize("beta", [0.5, -1.5])
@pytest.mark.parametrize("variant", GROUPED)
def test_against_a_loop_over_classes(variant, beta, scales):
    pos, neg = energies(6, 7)
    groups = (Y_POS, Y_NEG) if scales is None else (Y_POS, Y_NEG, scales[Y_POS])
    loss, expected = _per_class(pos, neg, beta, variant, scales=scales)
    found = contrastive_loss(pos, neg, beta, variant=variant, groups=groups)
    assert found.item() == pytest.approx(float(loss), rel=1e-12)
    for sides in both_slopes(pos, neg, beta, variant=variant, groups=groups):
        for side, oracle in zip(sides, expected, strict=True):
            # Samples without a partner have exactly no coefficient.
            assert [value == 0 for value in side.tolist()] == [value == 0 for value in oracle]
            assert relative_error(side, oracle) < 1e-12
        assert abs(sides[0].sum() + sides[1].sum()) < 1e-14


@pytest.mark.parametrize("variant", GROUPED)
def test_positives_without_a_partner_are_left_out(variant):
    pos, neg = energies(6, 7)
    kept = Y_POS != 3
    full = contrastive_loss(pos, neg, 0.5, variant=variant, groups=(Y_POS, Y_NEG))
    less = contrastive_loss(pos[kept], neg, 0.5, variant=variant, groups=(Y_POS[kept], Y_NEG))
    torch.testing.assert_close(full, less, rtol=1e-14, atol=0)
    a, b = slopes(full, pos, neg), slopes(less, pos, neg)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)
    assert a[0][~kept].item() == 0


@pytest.mark.parametrize("variant", GROUPED)
def test_one_class_is_no_class(variant):
    pos, neg = energies(4, 3)
    groups = (torch.zeros(4, dtype=torch.long), torch.zeros(3, dtype=torch.long))
    one = contrastive_loss(pos, neg, 0.5, variant=variant, groups=groups)
    none = contrastive_loss(pos, neg, 0.5, variant=variant)
    for a, b in zip((one, *slopes(one, pos, neg)), (none, *slopes(none, pos, neg)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)


@pytest.mark.parametrize("beta", [0.5, -0.5, 0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("variant", GROUPED)
def test_no_partner_at_all(variant, beta):
    pos, neg = energies(3, 2)
    groups = (torch.tensor([0, 0, 0]), torch.tensor([1, 1]))
    loss = contrastive_loss(pos, neg, beta, variant=variant, groups=groups)
    found = slopes(loss, pos, neg)
    closed = coefficients(pos, neg, beta, variant=variant, groups=groups)
    if beta == 0:  # sets nobody against anybody: the standard loss
        torch.testing.assert_close(loss, neg.mean() - pos.mean())
        torch.testing.assert_close(closed, found)
    else:
        assert loss == 0
        assert not any(side.any() for side in (*found, *closed))


@pytest.mark.parametrize("groups", [(Y_POS, Y_NEG), (Y_POS, Y_NEG, SCALES[Y_POS])], ids=len)
@pytest.mark.parametrize("variant", GROUPED)
def test_each_member_of_an_ensemble_and_a_zero_among_them(variant, groups):
    betas = torch.tensor([0.5, 0.0, -1.0])
    sides = [energies(6, 7, seed=seed) for seed in range(3)]
    pos, neg = (torch.stack(side) for side in zip(*sides, strict=True))
    loss = contrastive_loss(pos, neg, betas, variant=variant, groups=groups)
    found = slopes(loss, pos, neg)
    closed = coefficients(pos, neg, betas, variant=variant, groups=groups)
    for k, (beta, alone) in enumerate(zip(betas.tolist(), sides, strict=True)):
        single = contrastive_loss(*alone, beta, variant=variant, groups=groups)
        torch.testing.assert_close(loss[k], single, rtol=1e-13, atol=0)
        for side, oracle in enumerate(slopes(single, *alone)):
            torch.testing.assert_close(found[side][k], oracle, rtol=1e-13, atol=0)
            torch.testing.assert_close(closed[side][k], oracle, rtol=1e-13, atol=0)


@pytest.mark.parametrize("variant", GROUPED)
def test_classes_far_apart_in_energy_keep_their_own_normaliser(variant):
    # One joint softmax would give the low class no weight at all.
    pos = torch.tensor([5000.0, -5000.0, -4999.0], dtype=torch.float64, requires_grad=True)
    neg = torch.tensor([5001.0, -5000.5, -4999.5], dtype=torch.float64, requires_grad=True)
    y_pos, y_neg = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1])
    _, expected = _per_class(pos, neg, 0.5, variant, y_pos, y_neg)
    found = slopes(
        contrastive_loss(pos, neg, 0.5, variant=variant, groups=(y_pos, y_neg)), pos, neg
    )
    for side, oracle in zip(found, expected, strict=True):
        assert relative_error(side, oracle) < 1e-9


@pytest.mark.parametrize("level", [1e8, -1e8, 1e9, -1e9])
@pytest.mark.parametrize("beta", [0.5, -0.5, torch.tensor(0.5), torch.tensor([0.5])], ids=str)
@pytest.mark.parametrize("proposal", [False, True])
@pytest.mark.parametrize("variant", GROUPED)
def test_the_level_of_a_class_costs_no_other_class_its_digits(variant, proposal, beta, level):
    # All exact in float32, and not when class 1 is shifted by the level of class 0.
    pos = torch.tensor([level, level + 64, 0.25, 1.5, -1.0])
    neg = torch.tensor([level - 64, level, 0.625, 0.75, -1.25])
    y = torch.tensor([0, 0, 1, 1, 1])
    loss, expected = _per_class(pos, neg, float(beta), variant, y, y)
    models = beta.shape if isinstance(beta, torch.Tensor) else ()
    pos, neg = (f.expand(*models, 5).clone().requires_grad_() for f in (pos, neg))
    # One number for all of a class changes nothing.
    log_q = torch.where(y == 0, level, 0.0).expand(pos.shape)
    options = {"variant": variant, "groups": (y, y), "log_q": (log_q, log_q) if proposal else None}
    found = contrastive_loss(pos, neg, beta, **options)
    assert found.item() == pytest.approx(float(loss), rel=1e-6)
    for sides in both_slopes(pos, neg, beta, **options):
        for side, oracle in zip(sides, expected, strict=True):
            assert side.flatten().tolist() == pytest.approx([float(x) for x in oracle], rel=1e-6)


@pytest.mark.parametrize("variant", GROUPED)
def test_a_class_whose_only_negative_is_not_finite_has_no_partner(variant):
    pos, neg = energies(6, 7)
    broken = neg.detach().clone()
    broken[3] = torch.nan  # the only negative of class 2
    broken.requires_grad_()
    loss = contrastive_loss(pos, broken, 0.5, variant=variant, groups=(Y_POS, Y_NEG))
    kept_pos, kept_neg = Y_POS != 2, torch.arange(7) != 3
    clean = contrastive_loss(
        pos[kept_pos],
        neg[kept_neg],
        0.5,
        variant=variant,
        groups=(Y_POS[kept_pos], Y_NEG[kept_neg]),
    )
    torch.testing.assert_close(loss, clean, rtol=1e-14, atol=0)
    found, expected = slopes(loss, pos, broken), slopes(clean, pos, neg)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_heads_and_groups_together():
    pos, neg = energies(12, 14)
    heads = pos.reshape(6, 2), neg.reshape(7, 2)
    loss = contrastive_loss(*heads, 0.5, groups=(Y_POS, Y_NEG))
    summed = contrastive_loss(heads[0].sum(1), heads[1].sum(1), 0.5, groups=(Y_POS, Y_NEG))
    torch.testing.assert_close(loss, summed)


@pytest.mark.parametrize("variant", ["batch", "true"])
def test_refused_for_the_variants_that_couple_positives(variant):
    pos, neg = energies(6, 7)
    for function in (contrastive_loss, coefficients):
        with pytest.raises(ConfigError, match='groups are defined for variant="default" and'):
            function(pos, neg, 0.5, variant=variant, groups=(Y_POS, Y_NEG))
