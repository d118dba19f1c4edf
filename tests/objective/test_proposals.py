"""Weights of any log p - log q (Eq. 6): the proposal's own density divided out of them."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebmguard.energies import Variant
from ebmguard.objective import (
    coefficients,
    contrastive_loss,
    grad_scale,
    positive_weights,
    usable,
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

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True, database=None)
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
GROUPS = torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([1, 0, 0, 2, 1, 1, 4])


def proposal(n: int = 6, m: int = 7) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    pos, neg = (2 * torch.randn(k, generator=rng, dtype=torch.float64) - 1 for k in (n, m))
    return pos, neg


def textbook(pos, neg, beta, variant, log_q, groups=None):
    """The formulas as they are printed, in plain torch and with no care for overflow."""
    r_pos, r_neg = beta * pos - log_q[0], beta * neg - log_q[1]
    total = r_neg.exp().sum().expand(len(pos))
    if groups is not None:
        same = groups[0].unsqueeze(-1) == groups[1]
        paired = same.any(-1)
        r_pos, total = r_pos[paired], (same * r_neg.exp()).sum(-1)[paired]
    if variant == "default":
        return (1 + total / r_pos.exp()).log().mean() / beta
    no_pos = (total.log() - r_pos) / beta
    missing = (total / (total + r_pos.exp())).detach()  # 1 - w⁺
    if variant == "no_pos":
        return no_pos.mean()
    if variant == "batch":
        return missing.mean() * no_pos.mean()
    first, second = no_pos.chunk(2)
    of_first, of_second = missing.chunk(2)
    return 0.5 * (of_second.mean() * first.mean() + of_first.mean() * second.mean())


# -- the formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.5, 1.0, -0.8, torch.tensor(0.5), torch.tensor(-0.8)], ids=str)
@EVERY_VARIANT
def test_loss_gradient_and_coefficients_are_the_textbook_form(variant, beta):
    pos, neg = energies(6, 7)
    log_q = proposal()
    exact = float(beta) if isinstance(beta, float) else beta.double()
    expected = textbook(pos, neg, exact, variant, log_q)
    loss = contrastive_loss(pos, neg, beta, variant=variant, log_q=log_q)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    sides = slopes(expected, pos, neg)
    closed = coefficients(pos, neg, beta, variant=variant, log_q=log_q)
    for found in (slopes(loss, pos, neg), closed):
        torch.testing.assert_close(found, sides, rtol=1e-11, atol=1e-15)
    # The correction is no small one here.
    plain = coefficients(pos, neg, beta, variant=variant)
    assert max((a - b).abs().max() for a, b in zip(closed, plain, strict=True)) > 0.02


@pytest.mark.parametrize("beta", [0.5, -1.5])
@pytest.mark.parametrize("variant", ["default", "no_pos"])
def test_with_classes(variant, beta):
    pos, neg = energies(6, 7)
    log_q = proposal()
    expected = textbook(pos, neg, beta, variant, log_q, GROUPS)
    loss = contrastive_loss(pos, neg, beta, variant=variant, groups=GROUPS, log_q=log_q)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    sides = slopes(expected, pos, neg)
    for found in both_slopes(pos, neg, beta, variant=variant, groups=GROUPS, log_q=log_q):
        torch.testing.assert_close(found, sides, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("beta", [0.5, -0.8])
def test_weights(beta):
    pos, neg = (f.detach() for f in energies(6, 7))
    log_q = proposal()
    r_pos, r_neg = beta * pos - log_q[0], beta * neg - log_q[1]
    torch.testing.assert_close(weights(neg, beta, log_q=log_q[1]), torch.softmax(r_neg, 0))
    expected = torch.sigmoid(r_pos - torch.logsumexp(r_neg, 0))
    torch.testing.assert_close(positive_weights(pos, neg, beta, log_q=log_q), expected)
    torch.testing.assert_close(grad_scale(pos, neg, beta, log_q=log_q), (1 - expected).mean())


@EVERY_VARIANT
def test_each_member_of_an_ensemble_and_a_zero_among_them(variant):
    betas = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64)
    sides = [energies(6, 7, seed=seed) for seed in range(3)]
    pos, neg = (torch.stack(side).detach().requires_grad_() for side in zip(*sides, strict=True))
    q_pos, q_neg = (torch.stack([q, 2 * q, q.sin()]) for q in proposal())
    log_q = q_pos, q_neg
    options: Any = {"variant": variant, "log_q": log_q}
    loss = contrastive_loss(pos, neg, betas, **options)
    found, closed = slopes(loss, pos, neg), coefficients(pos, neg, betas, **options)
    for k, beta in enumerate(betas.tolist()):
        # An entry of 0 is the standard loss, which looks at no proposal.
        own: Any = {"variant": variant, "log_q": (log_q[0][k], log_q[1][k]) if beta else None}
        alone = contrastive_loss(*sides[k], beta, **own)
        torch.testing.assert_close(loss[k], alone, rtol=1e-12, atol=0)
        for side, expected in enumerate(slopes(alone, *sides[k])):
            torch.testing.assert_close(found[side][k], expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(closed[side][k], expected, rtol=1e-12, atol=0)
    for function in (positive_weights, grad_scale):
        row = function(pos, neg, betas, log_q=log_q)[1]
        assert torch.equal(row, function(pos, neg, betas)[1])
    assert torch.equal(weights(neg, betas, log_q=log_q[1])[1], weights(neg, betas)[1])


def test_members_of_different_variants_take_their_own():
    betas = torch.tensor([0.5, 1.0, -1.0], dtype=torch.float64)
    pos, neg = torch.randn(3, 6).double(), torch.randn(3, 7).double()
    log_q = torch.randn(3, 6).double(), torch.randn(3, 7).double()
    names: list[Variant] = ["default", "default", "batch"]
    found = contrastive_loss(pos, neg, betas, variant=names, log_q=log_q)
    closed = coefficients(pos, neg, betas, variant=names, log_q=log_q)
    for k, name in enumerate(names):
        own = log_q[0][k], log_q[1][k]
        alone = contrastive_loss(pos[k], neg[k], betas[k], variant=name, log_q=own)
        torch.testing.assert_close(found[k], alone)
        expected = coefficients(pos[k], neg[k], betas[k], variant=name, log_q=own)
        torch.testing.assert_close((closed[0][k], closed[1][k]), expected)


def test_several_exponents_share_the_proposal():
    pos, neg = energies(6, 7)
    each = [contrastive_loss(pos, neg, beta, log_q=proposal()) for beta in (0.5, -1.0, 2.0)]
    found = contrastive_loss(pos, neg, [0.5, -1.0, 2.0], log_q=proposal())
    torch.testing.assert_close(found, torch.stack(each).mean())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_heads_share_the_log_density_of_their_sample(reduce):
    pos, neg = (f.detach().reshape(-1, 2) for f in energies(12, 14))
    found = contrastive_loss(pos, neg, 0.5, reduce=reduce, log_q=proposal())
    reduced = getattr(pos, reduce)(1), getattr(neg, reduce)(1)
    torch.testing.assert_close(found, contrastive_loss(*reduced, 0.5, log_q=proposal()))


# -- properties ----------------------------------------------------------------------------------

BETAS = st.floats(0.05, 3).flatmap(lambda beta: st.sampled_from([beta, -beta]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Tensor], float]:
    """Energies of both sides, as many log-densities for each, and an exponent."""
    columns = []
    for _ in range(2):
        n = draw(st.integers(2, 6))
        values = st.lists(st.floats(-5, 5), min_size=n, max_size=n)
        columns += [torch.tensor(draw(values), dtype=torch.float64) for _ in range(2)]
    pos, q_pos, neg, q_neg = columns
    return [pos.requires_grad_(), neg.requires_grad_(), q_pos, q_neg], draw(BETAS)


@EVERY_VARIANT
@given(cases(), st.floats(-1e3, 1e3))
@SETTINGS
def test_a_constant_changes_nothing(variant, case, constant):
    (pos, neg, q_pos, q_neg), beta = case
    one = contrastive_loss(pos, neg, beta, variant=variant, log_q=(q_pos, q_neg))
    moved = q_pos + constant, q_neg + constant
    other = contrastive_loss(pos, neg, beta, variant=variant, log_q=moved)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    sides = zip(slopes(one, pos, neg), slopes(other, pos, neg), strict=True)
    for a, b in sides:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=0)


@EVERY_VARIANT
@given(cases(), st.sampled_from([torch.float32, torch.float64]))
@SETTINGS
def test_a_log_density_of_zero_is_none_bit_for_bit(variant, case, dtype):
    (pos, neg, _, _), beta = case
    pos, neg = (f.detach().to(dtype).requires_grad_() for f in (pos, neg))
    nothing = torch.zeros_like(pos), torch.zeros_like(neg)
    one = contrastive_loss(pos, neg, beta, variant=variant)
    other = contrastive_loss(pos, neg, beta, variant=variant, log_q=nothing)
    assert torch.equal(one, other)
    for a, b in zip(slopes(one, pos, neg), slopes(other, pos, neg), strict=True):
        assert torch.equal(a, b)
    closed = coefficients(pos, neg, beta, variant=variant)
    for a, b in zip(
        closed, coefficients(pos, neg, beta, variant=variant, log_q=nothing), strict=True
    ):
        assert torch.equal(a, b)


@given(cases())
@SETTINGS
def test_any_weights_at_all_can_be_asked_for(case):
    (pos, neg, r_pos, r_neg), beta = case
    log_q = beta * pos.detach() - r_pos, beta * neg.detach() - r_neg
    torch.testing.assert_close(weights(neg, beta, log_q=log_q[1]).detach(), torch.softmax(r_neg, 0))
    missing = torch.sigmoid(torch.logsumexp(r_neg, 0) - r_pos)
    to_pos, to_neg = slopes(contrastive_loss(pos, neg, beta, log_q=log_q), pos, neg)
    torch.testing.assert_close(to_pos, -missing / len(pos), rtol=1e-9, atol=0)
    expected = missing.mean() * torch.softmax(r_neg, 0)
    torch.testing.assert_close(to_neg, expected, rtol=1e-9, atol=0)


@EVERY_VARIANT
@given(cases())
@SETTINGS
def test_sides_of_the_gradient_sum_to_zero(variant, case):
    (pos, neg, q_pos, q_neg), beta = case
    loss = contrastive_loss(pos, neg, beta, variant=variant, log_q=(q_pos, q_neg))
    to_pos, to_neg = slopes(loss, pos, neg)
    assert (to_pos <= 0).all()
    assert (to_neg >= 0).all()
    assert abs(to_pos.sum() + to_neg.sum()) <= 1e-14 * len(pos)


# -- what flows where ----------------------------------------------------------------------------


@EVERY_VARIANT
def test_no_gradient_flows_into_the_log_density(variant):
    pos, neg = energies(6, 7)
    q_pos, q_neg = (q.requires_grad_() for q in proposal())
    loss = contrastive_loss(pos, neg, 0.5, variant=variant, log_q=(q_pos, q_neg))
    for q in (q_pos, q_neg):
        (slope,) = torch.autograd.grad(loss, q, allow_unused=True, retain_graph=True)
        assert slope is None
    assert all(side.any() for side in slopes(loss, pos, neg))


@pytest.mark.parametrize("variant", ["default", "no_pos"])
def test_second_derivatives(variant):
    pos, neg = energies(6, 7)

    def loss(p, n):
        return contrastive_loss(p, n, 0.7, variant=variant, log_q=proposal())

    assert torch.autograd.gradcheck(loss, (pos, neg))
    assert torch.autograd.gradgradcheck(loss, (pos, neg))
    found = torch.autograd.functional.hessian(loss, (pos.detach(), neg.detach()))
    expected = torch.autograd.functional.hessian(
        lambda p, n: textbook(p, n, 0.7, variant, proposal()), (pos.detach(), neg.detach())
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)


def test_reads_no_value_on_the_host():
    pos, neg = (torch.empty(n, device="meta", requires_grad=True) for n in (4, 3))
    log_q = torch.empty(4, device="meta"), torch.empty(3, device="meta")
    for beta in (0.5, torch.tensor(0.5)):
        loss = contrastive_loss(pos, neg, beta, log_q=log_q)
        assert [g.shape for g in slopes(loss, pos, neg)] == [(4,), (3,)]


# -- log-densities that are lost -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e30, -3e30])
@pytest.mark.parametrize("beta", [0.5, -0.5, torch.tensor(0.5)], ids=str)
@EVERY_VARIANT
def test_a_log_density_that_is_not_finite_leaves_its_sample_out(variant, beta, bad):
    pos, neg = energies(6, 7)
    q_pos, q_neg = (q.clone() for q in proposal())
    q_pos[[1, 4]], q_neg[[0, 3]] = bad, bad  # one positive of each half
    in_pos, in_neg = (torch.tensor([abs(v) < 1e30 for v in q.tolist()]) for q in (q_pos, q_neg))
    with torch.autograd.set_detect_anomaly(True):
        loss = contrastive_loss(pos, neg, beta, variant=variant, log_q=(q_pos, q_neg))
        found = slopes(loss, pos, neg)
    kept = q_pos[in_pos], q_neg[in_neg]
    clean = contrastive_loss(pos[in_pos], neg[in_neg], beta, variant=variant, log_q=kept)
    torch.testing.assert_close(loss, clean, rtol=1e-13, atol=1e-15)
    expected = slopes(clean, pos, neg)
    closed = coefficients(pos, neg, beta, variant=variant, log_q=(q_pos, q_neg))
    for sides in (found, closed):
        torch.testing.assert_close(sides, expected, rtol=1e-12, atol=1e-15)
    w = positive_weights(pos, neg, beta, log_q=(q_pos, q_neg))
    assert torch.equal(w.isnan(), ~in_pos)
    assert torch.equal(weights(neg, beta, log_q=q_neg) == 0, ~in_neg)
    assert torch.equal(usable(neg.detach(), beta, q_neg), in_neg)


@EVERY_VARIANT
def test_nothing_is_left_of_a_side_without_a_log_density(variant):
    pos, neg = energies(6, 7)
    lost = torch.full((7,), torch.nan, dtype=torch.float64)
    loss = contrastive_loss(pos, neg, 0.5, variant=variant, log_q=(proposal()[0], lost))
    assert loss == 0
    assert not any(side.any() for side in slopes(loss, pos, neg))


@pytest.mark.parametrize("zero", [0.0, 1e-36])
def test_where_the_exponent_is_zero_a_lost_log_density_is_not_looked_at(zero):
    f, lost = torch.zeros(3), torch.full((3,), torch.nan)
    betas = torch.tensor([[zero], [1.0]])
    assert usable(f.expand(2, 3), betas, lost.expand(2, 3)).tolist() == [[True] * 3, [False] * 3]
    pos, neg = torch.randn(2, 3), torch.randn(2, 3)
    q = torch.stack([lost, f])
    found = contrastive_loss(pos, neg, torch.tensor([zero, 1.0]), log_q=(q, q))
    torch.testing.assert_close(found[0], neg[0].mean() - pos[0].mean())
    assert found[1].isfinite()


@pytest.mark.parametrize("beta", [1e-9, -1e-9, torch.tensor(1e-9)], ids=str)
@EVERY_VARIANT
def test_a_log_density_too_large_for_the_loss_leaves_its_sample_out(variant, beta):
    """The loss divides by β*: log q = -9e29 at β* = 1e-9 would make it infinite in float32."""
    pos, neg = (f.detach().float().requires_grad_() for f in energies(6, 7))
    q_pos, q_neg = torch.zeros(6), torch.zeros(7)
    q_pos[1], q_neg[2] = -9e29, 9e29
    in_pos, in_neg = q_pos == 0, q_neg == 0
    loss = contrastive_loss(pos, neg, beta, variant=variant, log_q=(q_pos, q_neg))
    assert loss.isfinite()
    found = slopes(loss, pos, neg)
    assert torch.equal(found[0] == 0, ~in_pos)
    assert torch.equal(found[1] == 0, ~in_neg)


# -- digits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("beta", [0.5, 2.0, -0.5])
@EVERY_VARIANT
def test_float32_energies_keep_five_digits_beside_large_offsets(variant, beta, dtype):
    """Of f and of log q, which for images is in the thousands; the latter in either precision."""
    pos, neg = ((f.detach() + 3e4).float().requires_grad_() for f in energies(6, 16))
    q_pos, q_neg = ((q - 1e5).to(dtype) for q in proposal(6, 16))
    log_q = q_pos, q_neg
    # What float32 can hold of all of them, in exact arithmetic.
    exact = [
        [Decimal(beta) * f - q for f, q in zip(decimals(side), decimals(log), strict=True)]
        for side, log in zip((pos, neg), log_q, strict=True)
    ]
    expected = oracles.gradient(exact[0], exact[1], Decimal(1), variant)
    for found in both_slopes(pos, neg, beta, variant=variant, log_q=log_q):
        for side, oracle in zip(found, expected, strict=True):
            assert side.dtype == torch.float32
            assert relative_error(side, oracle) < 1e-5


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
    log_q = torch.full((6,), -6e4).half(), torch.linspace(-6e4, 6e4, 7).half()
    single = log_q[0].float(), log_q[1].float()
    found = contrastive_loss(pos, neg, 0.5, log_q=log_q)
    assert found.isfinite()
    assert torch.equal(found, contrastive_loss(pos, neg, 0.5, log_q=single))


# -- proposals that know their density -----------------------------------------------------------

GRID = torch.linspace(-9, 9, 6001, dtype=torch.float64)


def model(x: Tensor) -> Tensor:
    """f of an unnormalised density on a line, with two modes."""
    return torch.logaddexp(-2 * (x - 1) ** 2, -((x + 1.5) ** 2) - 0.3)


def features(x: Tensor) -> Tensor:
    """What stands for the gradient of f with respect to three parameters."""
    return torch.stack([x, x.square(), x.sin()])


def gaussian(x: Tensor, mean: float = 0.3, std: float = 2.0) -> Tensor:
    """Log-density, normalised."""
    return -0.5 * ((x - mean) / std) ** 2 - math.log(std * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("output_scale", [1.0, 20.0])
def test_a_gaussian_proposal_corrected_gives_the_models_expectations(output_scale):
    """By quadrature: a grid of negatives whose log q is that of their spacing in probability."""
    density = torch.softmax(model(GRID), 0)
    expected = features(GRID) @ density
    # Negatives at the quantiles of q, some 2,000 points: an equal share of q for each.
    levels = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    x = 0.3 + 2.0 * math.sqrt(2) * torch.erfinv(2 * levels - 1)
    f = model(x) / output_scale
    w = weights(f, output_scale, log_q=gaussian(x))
    torch.testing.assert_close(features(x) @ w, expected, rtol=2e-3, atol=2e-3)
    # Without the correction the expectation is that of another density.
    plain = features(x) @ weights(f, output_scale)
    assert (plain - expected).abs().max() > 0.2
    # A tempered proposal, q exp(a f), leaves the rest of the exponent to the weights.
    tempered = torch.softmax(0.4 * model(GRID) + gaussian(GRID), 0)
    w = weights(model(GRID), 0.6, log_q=gaussian(GRID)) * tempered
    torch.testing.assert_close(w / w.sum(), density)


def test_the_corrected_gradient_is_that_of_an_exact_sampler_within_monte_carlo_error():
    rng = torch.Generator().manual_seed(0)
    rounds, m = 400, 512

    def gradient(x_neg: Tensor, log_q: tuple[Tensor, Tensor] | None) -> Tensor:
        """In θ at 0 of f + θ · features, of the loss without its positives' extra weight."""
        x_pos = 0.5 * torch.ones(2, dtype=torch.float64)
        _, to_neg = coefficients(model(x_pos), model(x_neg), 1.0, variant="no_pos", log_q=log_q)
        return features(x_neg) @ to_neg

    density = torch.softmax(model(GRID), 0)
    spacing = (GRID[1] - GRID[0]).item()
    exact, corrected, plain = [], [], []
    for _ in range(rounds):
        chosen = torch.multinomial(density, m, replacement=True, generator=rng)
        jitter = torch.rand(m, generator=rng, dtype=torch.float64) - 0.5
        exact.append(features(GRID[chosen] + spacing * jitter).mean(1))
        x = 0.3 + 2.0 * torch.randn(m, generator=rng, dtype=torch.float64)
        at_data = gaussian(0.5 * torch.ones(2, dtype=torch.float64))
        corrected.append(gradient(x, (at_data, gaussian(x))))
        plain.append(gradient(x, None))
    sides = [torch.stack(found) for found in (exact, corrected, plain)]
    means = [found.mean(0) for found in sides]
    errors = [found.std(0) / math.sqrt(rounds) for found in sides]
    apart = (means[0] - means[1]).abs() / (errors[0] ** 2 + errors[1] ** 2).sqrt()
    # Self-normalised weights have a bias of order 1/M, beside errors of order (rounds M)^-1/2.
    assert (apart < 4).all()
    assert ((means[2] - means[0]).abs() / errors[2]).max() > 50
