"""What holds for all energies: any size, scale and dtype, with NaN and infinities among them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ebmguard.energies import Variant
from ebmguard.objective import (
    coefficients,
    contrastive_loss,
    grad_scale,
    positive_weights,
    weights,
)
from tests.objective.oracles import (
    VARIANTS,
    proposal,
    relative_error,
    slopes,
    textbook,
)

NOT_FINITE = st.sampled_from([float("nan"), float("inf"), float("-inf")])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
SUBNORMAL = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
SOME_VARIANT = st.sampled_from(VARIANTS)


@dataclass
class Case:
    pos: Tensor
    neg: Tensor
    beta: float

    def usable(self, f: Tensor) -> Tensor:
        """The policy in the words of the documentation, value by value."""
        wide = f.detach().to(torch.promote_types(f.dtype, torch.float32)).double()
        limit = 1e-4 * torch.finfo(torch.promote_types(f.dtype, torch.float32)).max
        return torch.tensor([abs(v) <= limit and abs(self.beta * v) <= 1e30 for v in wide.tolist()])


def _logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


@st.composite
def cases(draw: st.DrawFn, *, finite: bool = False) -> Case:
    """Scales from 1e-30 to 1e30 for energies and exponent, together or apart."""
    scale = draw(_logarithmic(-30, 30))
    together = st.floats(0.01, 30).map(lambda value: value / scale)
    size = draw(st.one_of(together, _logarithmic(-30, 30)))
    # Exact limits of the policy differ by a rounding; stay off them.
    beta = draw(st.sampled_from([1, -1])) * min(max(size, 1e-30), 1e30)
    value = st.floats(-4, 4).map(lambda v: v * scale)
    if not finite:
        value = st.one_of(value, value, value, NOT_FINITE)
    dtype = draw(DTYPES)
    pos, neg = (
        torch.tensor(draw(st.lists(value, min_size=2, max_size=6)), dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for _ in range(2)
    )
    return Case(pos, neg, beta)


@st.composite
def moderate(draw: st.DrawFn) -> Case:
    """Float64 energies whose exponents stay within ±30, for exact comparisons."""
    value = st.floats(-10, 10)
    pos, neg = (
        torch.tensor(
            draw(st.lists(value, min_size=2, max_size=6)), dtype=torch.float64
        ).requires_grad_()
        for _ in range(2)
    )
    beta = draw(st.floats(0.05, 3)) * draw(st.sampled_from([1, -1]))
    return Case(pos, neg, beta)


def _off_the_limits(case: Case) -> bool:
    values = torch.cat([case.pos, case.neg]).detach().double()
    edge = (case.beta * values).abs() / 1e30
    return not ((edge > 1 - 1e-6) & (edge < 1 + 1e-6)).any()


@given(SOME_VARIANT, cases().filter(_off_the_limits))
def test_gradients_are_finite_and_their_sides_sum_to_zero(variant: Variant, case: Case) -> None:
    loss = contrastive_loss(case.pos, case.neg, case.beta, variant=variant)
    assert loss.isfinite()
    assert loss.dtype == torch.promote_types(case.pos.dtype, torch.float32)
    found = slopes(loss, case.pos, case.neg)
    closed = coefficients(case.pos, case.neg, case.beta, variant=variant)
    for sides in (found, closed):
        for side, f in zip(sides, (case.pos, case.neg), strict=True):
            assert side.isfinite().all()
            assert not side[~case.usable(f)].any()
        info = torch.finfo(sides[0].dtype)
        size = sides[1].double().sum().item()
        # Autograd passes through slope / β*, which may be a subnormal number of float32.
        smallest = info.smallest_normal + SUBNORMAL * abs(case.beta)
        rounding = 16 * (info.eps * size + smallest)
        assert abs(sides[0].double().sum().item() + size) <= rounding
        assert (sides[0] <= 0).all()
        assert (sides[1] >= 0).all()
    assert all(side.dtype == case.pos.dtype for side in found)
    assert closed[0].sum() >= -1 - 1e-6


@given(cases().filter(_off_the_limits))
def test_weights_are_probabilities(case: Case) -> None:
    w = weights(case.neg, case.beta).detach()
    usable = case.usable(case.neg)
    assert ((w >= 0) & (w <= 1)).all()
    assert not w[~usable].any()
    assert w.sum().item() == pytest.approx(1.0 if usable.any() else 0.0, abs=1e-6)
    w_pos = positive_weights(case.pos, case.neg, case.beta).detach()
    usable = case.usable(case.pos)
    assert w_pos[~usable].isnan().all()
    assert ((w_pos[usable] >= 0) & (w_pos[usable] <= 1)).all()
    scale = grad_scale(case.pos, case.neg, case.beta).item()
    assert 0 <= scale <= 1 + 1e-6
    if usable.any():
        assert scale == pytest.approx(1 - w_pos[usable].mean().item(), abs=1e-6)


@given(SOME_VARIANT, cases(finite=True), st.integers(-10, 10))
def test_only_the_product_of_exponent_and_energy_counts(
    variant: Variant, case: Case, power: int
) -> None:
    # L(c f, β*/c) = c L(f, β*): exact to the bit for powers of two, within the dtype's range.
    factor = 2.0**power
    pos, neg = case.pos.detach().double(), case.neg.detach().double()
    one = contrastive_loss(pos, neg, case.beta, variant=variant)
    other = contrastive_loss(factor * pos, factor * neg, case.beta / factor, variant=variant)
    assert other.item() == factor * one.item()
    for a, b in zip(
        coefficients(pos, neg, case.beta, variant=variant),
        coefficients(factor * pos, factor * neg, case.beta / factor, variant=variant),
        strict=True,
    ):
        assert torch.equal(a, b)


@given(SOME_VARIANT, moderate(), st.floats(-1e6, 1e6), st.none() | st.floats(-1e3, 1e3))
def test_loss_and_gradient_are_the_textbooks_whatever_the_level_of_f_and_log_q(
    variant: Variant, case: Case, shift: float, level: float | None
) -> None:
    pos, neg = ((f.detach() + shift).requires_grad_() for f in (case.pos, case.neg))
    q_pos, q_neg = proposal(len(pos), len(neg))
    log_q = None if level is None else (q_pos + level, q_neg + level)
    right = textbook(pos, neg, case.beta, variant, log_q=log_q)
    loss = contrastive_loss(pos, neg, case.beta, variant=variant, log_q=log_q)
    assert loss.item() == pytest.approx(float(right.loss), rel=1e-10, abs=1e-10)
    for side, oracle in zip(slopes(loss, pos, neg), (right.to_pos, right.to_neg), strict=True):
        assert relative_error(side, oracle) < 1e-10


@given(moderate())
def test_likelier_positives_count_for_less_by_eq_31_and_32(case: Case) -> None:
    found = coefficients(case.pos, case.neg, case.beta)[0].detach()
    log_w, log_w_neg = (case.beta * f.detach() for f in (case.pos, case.neg))
    share = -torch.logaddexp(log_w, torch.logsumexp(log_w_neg, 0))
    torch.testing.assert_close(found / found.sum(), share.softmax(0), rtol=1e-11, atol=1e-300)
    in_order = (found / found.sum())[log_w.argsort()]
    assert (in_order.diff() <= 1e-12).all()
