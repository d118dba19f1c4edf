"""Loss, gradient, coefficients and weights in float64 against 80-digit textbook forms."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch.nn import functional as F

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
    beta: Any
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


def call(beta: Any, n: int = 6, m: int = 7, *options: str, heads: Any = ()) -> Call:
    return Call(beta, n, m, heads, frozenset(options))


CALLS = [
    *(call(0.5, 6, 4), call(-2.5, 5, 3), call(1e-3, 2, 1), call(3.7, 3, 2), call(1.0, 2, 50)),
    *(call(-0.8, 50, 1), call(0.7, 1, 3), call(1e-9, 6, 5), call(-1e-9, 6, 64)),
    *(call(torch.tensor(2.0), 4, 3), call(torch.tensor(2.0).double(), 4, 3), call(2, 4, 3)),
    *(call(torch.tensor(2), 4, 3), call(torch.tensor(0), 4, 3), call(torch.tensor(0.0), 4, 3)),
    *(call(0, 4, 3), call(0.0, 4, 3), call(0.0, 4, 3, heads=(1,)), call(0.0, 4, 3, heads=(2, 2))),
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
    right = textbook(summed[0], summed[1], float(made.beta), variant, **options)
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


@pytest.mark.parametrize("sizes", [(1, 1), (5, 1), (6, 4)], ids=str)
def test_the_default_is_a_classification_by_softmax_and_above_its_bound_by_no_pos(sizes):
    """Which of 1 + M samples is the real one (App. C); log sigmoid is concave (App. D, Eq. 28)."""
    pos, neg = energies(*sizes)
    for beta in (0.5, 1.0, 6.0):
        logits = beta * torch.cat([pos.unsqueeze(1), neg.expand(len(pos), -1)], dim=1)
        classified = F.cross_entropy(logits, torch.zeros(len(pos), dtype=torch.long)) / beta
        loss = contrastive_loss(pos, neg, beta)
        # The absolute tolerance is for cross_entropy: it forms 1 - softmax.
        torch.testing.assert_close(loss, classified, rtol=1e-12, atol=1e-15)
        bound = F.softplus(beta * contrastive_loss(pos, neg, beta, variant="no_pos")) / beta
        assert loss > bound - 1e-12 * (len(pos) == 1)
        equal = contrastive_loss(pos.mean().expand_as(pos), neg, beta)
        torch.testing.assert_close(equal, bound, rtol=1e-12, atol=1e-15)


def test_zero_exponent_leaves_the_callers_loss_untouched_bit_for_bit():
    for heads, dtype in (((), torch.float16), ((1,), torch.float64)):
        pos, neg = energies(64, 48, heads=heads, dtype=dtype)
        found = contrastive_loss(pos, neg, 0.0)
        assert found.dtype == dtype
        assert torch.equal(found, neg.mean() - pos.mean())


@pytest.mark.parametrize("beta", [0.7, -0.7, 0.0, torch.tensor(0.0), torch.tensor(0.7)])
@pytest.mark.parametrize("option", ["plain", "log q", "nan"])
@pytest.mark.parametrize("variant", OF_CLASSES)
def test_each_row_is_the_class_of_its_positive(variant, option, beta):
    pos, neg = energies(5, 15)
    if option == "nan":
        neg.data[4:6] = torch.nan
    log_q = proposal(5, 15) if option == "log q" else None
    if log_q is not None and beta == 0 and not isinstance(beta, torch.Tensor):
        return  # refused
    labels = torch.arange(5), torch.arange(5).repeat_interleave(3)
    in_rows: Any = {"groups": "rows", "log_q": log_q and (log_q[0], log_q[1].reshape(5, 3))}
    for column in (pos, pos[:, None]):
        one = contrastive_loss(pos, neg, beta, variant=variant, groups=labels, log_q=log_q)
        found = contrastive_loss(column, neg.reshape(5, 3), beta, variant=variant, **in_rows)
        ours, theirs = ((x, *slopes(x, pos, neg)) for x in (found, one))
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15, equal_nan=True)
    closed = coefficients(pos, neg.reshape(5, 3), beta, variant=variant, **in_rows)
    right = coefficients(pos, neg, beta, variant=variant, groups=labels, log_q=log_q)
    torch.testing.assert_close(closed, right, rtol=1e-12, atol=1e-15, equal_nan=True)
