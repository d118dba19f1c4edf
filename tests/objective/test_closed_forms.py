"""Loss, gradient, coefficients and weights in float64 against 80-digit textbook forms."""

from __future__ import annotations

from dataclasses import dataclass
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
from tests.objective.oracles import (
    OF_CLASSES,
    VARIANTS,
    both_slopes,
    decimals,
    energies,
    proposal,
    quotient,
    relative_error,
    slopes,
    textbook,
)

TOLERANCE = 1e-12
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)

# Class 3 has no negative, class 4 no positive.
LABELS = torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([1, 0, 0, 2, 1, 1, 4])
SCALES = torch.tensor([0.25, 3.0, 1.5, 2.0], dtype=torch.float64)[LABELS[0]]


@dataclass(frozen=True)
class Call:
    beta: float
    n: int = 6
    m: int = 7
    heads: tuple[int, ...] = ()
    options: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return ", ".join(map(str, (self.n, self.m, self.beta, *self.heads, *sorted(self.options))))

    def keywords(self) -> dict[str, Any]:
        groups = (*LABELS, SCALES) if "scales" in self.options else LABELS
        return {
            "groups": groups if self.options & {"classes", "scales"} else None,
            "log_q": proposal(self.n, self.m) if "log q" in self.options else None,
        }


def call(beta: float, n: int = 6, m: int = 7, *options: str, heads: Any = ()) -> Call:
    return Call(beta, n, m, heads, frozenset(options))


CALLS = [
    *(call(0.5, 6, 4), call(-2.5, 5, 3), call(1e-3, 2, 1), call(3.7, 3, 2), call(1.0, 2, 50)),
    *(call(-0.8, 50, 1), call(0.7, 1, 3)),
    *(call(0.5, 4, 5, heads=(1,)), call(0.5, 4, 5, heads=(3,)), call(-0.8, 3, 4, heads=(2, 2))),
    *(call(0.5, 6, 7, "log q"), call(-0.8, 3, 4, "log q"), call(1.0, 4, 2, "log q", heads=(2,))),
    *(call(beta, 6, 7, name) for beta in (0.5, -1.5) for name in ("classes", "scales")),
    *(call(0.5, 6, 7, "classes", "log q"), call(-1.5, 6, 7, "scales", "log q")),
    call(0.5, 6, 7, "classes", heads=(2,)),
]


def defined(made: Call) -> tuple[Any, ...]:
    if made.options & {"classes", "scales"}:
        return OF_CLASSES
    return VARIANTS if made.n > 1 else VARIANTS[:3]


@EVERY_VARIANT
def test_oracle_closed_forms_are_the_slope_of_the_oracle_loss(variant):
    pos, neg = energies(6, 7)
    for made in (call(0.5), call(-0.8, 6, 7, "log q"), call(0.5, 6, 7, "scales", "log q")):
        if variant in defined(made):
            closed = textbook(pos, neg, made.beta, variant, **made.keywords())
            numeric = quotient(pos, neg, made.beta, variant, **made.keywords())
            for a, b in zip((closed.to_pos, closed.to_neg), numeric, strict=True):
                # Zero at 45 digits is zero.
                assert relative_error(a, [Decimal(0) if abs(x) < 1e-40 else x for x in b]) < 1e-30


@pytest.mark.parametrize(
    ("made", "variant"), [(made, variant) for made in CALLS for variant in defined(made)], ids=str
)
def test_against_the_textbook(made, variant):
    pos, neg = energies(made.n, made.m, heads=made.heads)
    options = made.keywords()
    summed = [
        [sum(decimals(f.flatten()), Decimal(0)) for f in side] if made.heads else side
        for side in (pos, neg)
    ]
    right = textbook(summed[0], summed[1], made.beta, variant, **options)
    loss = contrastive_loss(pos, neg, made.beta, variant=variant, **options)
    assert loss.shape == ()
    assert relative_error(loss, right.loss) < TOLERANCE
    closed = coefficients(pos, neg, made.beta, variant=variant, **options)
    sides = slopes(loss, pos, neg)
    for found, side, oracle in zip(closed, sides, (right.to_pos, right.to_neg), strict=True):
        assert found.dtype == torch.float64
        assert not found.requires_grad
        # Every head of a sample gets that sample's slope.
        for each in (found, *side.reshape(len(found), -1).T):
            assert relative_error(each, oracle) < TOLERANCE
    assert abs(closed[0].sum() + closed[1].sum()) < 1e-14
    if options["groups"] is None:
        q = options["log_q"]
        given = {} if q is None else {"log_q": q}
        of_neg = {} if q is None else {"log_q": q[1]}
        assert relative_error(weights(neg, made.beta, **of_neg), right.weights) < TOLERANCE
        w_pos = positive_weights(pos, neg, made.beta, **given)
        assert relative_error(w_pos, right.positive_weights) < TOLERANCE
        scale = grad_scale(pos, neg, made.beta, **given)
        assert scale.shape == ()
        assert relative_error(scale, right.grad_scale) < TOLERANCE


def test_positive_weight_is_what_a_positive_gets_as_one_more_negative():
    pos, neg = energies(4, 5)
    for f, w_pos in zip(pos, positive_weights(pos, neg, 0.7), strict=True):
        joined = weights(torch.cat([neg, f.reshape(1)]), 0.7)
        assert w_pos.item() == pytest.approx(joined[-1].item(), rel=TOLERANCE)


@EVERY_VARIANT
def test_every_form_of_a_single_exponent_is_the_same(variant):
    pos, neg = energies(4, 3)
    reference = contrastive_loss(pos, neg, 2.0, variant=variant)
    expected = slopes(reference, pos, neg)
    forms: list[float | torch.Tensor] = [
        2,
        *(torch.tensor(2.0, dtype=dtype) for dtype in (torch.float64, torch.float32)),
    ]
    for form in (*forms, torch.tensor(2)):
        found = contrastive_loss(pos, neg, form, variant=variant)
        assert found.shape == ()
        torch.testing.assert_close(found, reference, rtol=1e-14, atol=0)
        torch.testing.assert_close(slopes(found, pos, neg), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("heads", [(), (1,), (2, 2)], ids=str)
@EVERY_VARIANT
def test_zero_exponent_is_the_plain_difference(variant, heads):
    pos, neg = energies(4, 3, heads=heads)
    p, n = (f.reshape(len(f), -1).sum(1) for f in (pos, neg))
    for beta in (0, 0.0, torch.tensor(0.0), torch.tensor(0)):
        found = contrastive_loss(pos, neg, beta, variant=variant)
        torch.testing.assert_close(found, n.mean() - p.mean(), rtol=TOLERANCE, atol=0)
        for to_pos, to_neg in both_slopes(pos, neg, beta, variant=variant):
            torch.testing.assert_close(to_pos, torch.full_like(to_pos, -1 / 4))
            torch.testing.assert_close(to_neg, torch.full_like(to_neg, 1 / 3))


def test_zero_exponent_leaves_the_callers_loss_untouched_bit_for_bit():
    for heads, dtype in (((), torch.float16), ((1,), torch.float64)):
        pos, neg = energies(64, 48, heads=heads, dtype=dtype)
        found = contrastive_loss(pos, neg, 0.0)
        assert found.dtype == dtype
        assert torch.equal(found, neg.mean() - pos.mean())


@pytest.mark.parametrize("beta", [0, 0.0, torch.tensor(0.0)], ids=repr)
def test_weights_at_zero_exponent_are_uniform_whatever_the_energies(beta):
    pos, neg = (100 * f.detach() for f in energies(6, 4))
    torch.testing.assert_close(weights(neg, beta), torch.full_like(neg, 1 / 4))
    torch.testing.assert_close(positive_weights(pos, neg, beta), torch.full_like(pos, 1 / 5))
    torch.testing.assert_close(grad_scale(pos, neg, beta), torch.tensor(4 / 5).double())
    neg[1] = torch.nan  # which leaves three
    torch.testing.assert_close(grad_scale(pos, neg, beta), torch.tensor(3 / 4).double())


@pytest.mark.parametrize("variant", OF_CLASSES)
def test_one_class_is_no_class(variant):
    pos, neg = energies(4, 3)
    one = contrastive_loss(pos, neg, 0.5, variant=variant, groups=(torch.zeros(4), torch.zeros(3)))
    none = contrastive_loss(pos, neg, 0.5, variant=variant)
    for a, b in zip((one, *slopes(one, pos, neg)), (none, *slopes(none, pos, neg)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)


@pytest.mark.parametrize("beta", [0.7, -0.7, 0.0, torch.tensor(0.0), torch.tensor(0.7)])
@pytest.mark.parametrize("options", [(), ("log q",), ("nan",)], ids=str)
@pytest.mark.parametrize("variant", OF_CLASSES)
def test_each_row_is_the_class_of_its_positive(variant, options, beta):
    pos, neg = (x.detach() for x in energies(5, 15))
    if options == ("nan",):
        neg[4:6] = torch.nan
    pos, neg = pos.requires_grad_(), neg.requires_grad_()
    log_q = proposal(5, 15) if options == ("log q",) else None
    if log_q is not None and beta == 0 and not isinstance(beta, torch.Tensor):
        return  # refused
    labels = torch.arange(5), torch.arange(5).repeat_interleave(3)
    in_rows: Any = {"groups": "rows", "log_q": log_q and (log_q[0], log_q[1].reshape(5, 3))}
    for column in (pos, pos[:, None]):
        one = contrastive_loss(pos, neg, beta, variant=variant, groups=labels, log_q=log_q)
        found = contrastive_loss(column, neg.reshape(5, 3), beta, variant=variant, **in_rows)
        pairs = zip((found, *slopes(found, pos, neg)), (one, *slopes(one, pos, neg)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15, equal_nan=True)
    if variant == "default" and isinstance(beta, float) and beta and not options:
        up = beta * torch.cat([pos[:, None], neg.reshape(5, 3)], 1)
        right = (up.logsumexp(1) - up[:, 0]).mean() / beta
        torch.testing.assert_close(found, right, rtol=1e-13, atol=0)
    to_pos, to_neg = coefficients(pos, neg.reshape(5, 3), beta, variant=variant, **in_rows)
    both = coefficients(pos, neg, beta, variant=variant, groups=labels, log_q=log_q)
    for a, b in zip((to_pos, to_neg), both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("beta", [0.5, -0.5, 0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("variant", OF_CLASSES)
def test_no_partner_at_all(variant, beta):
    pos, neg = energies(3, 2)
    groups = (torch.tensor([0, 0, 0]), torch.tensor([1, 1]))
    loss = contrastive_loss(pos, neg, beta, variant=variant, groups=groups)
    found = both_slopes(pos, neg, beta, variant=variant, groups=groups)
    if beta == 0:  # sets nobody against anybody: the standard loss
        torch.testing.assert_close(loss, neg.mean() - pos.mean())
        for to_pos, to_neg in found:
            torch.testing.assert_close(to_pos, torch.full_like(pos, -1 / 3))
            torch.testing.assert_close(to_neg, torch.full_like(neg, 1 / 2))
    else:
        assert loss == 0
        assert not any(side.any() for sides in found for side in sides)
