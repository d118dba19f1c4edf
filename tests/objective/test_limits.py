"""Limits: an exponent of 0 and nearly so, a side that is out of reach; nothing is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard.objective import (
    coefficients,
    contrastive_loss,
    grad_scale,
    weights,
)
from tests.objective.oracles import VARIANTS, both_slopes, energies, slopes

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 0.0}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def _plain(pos, neg):
    """The β* = 0 gradient: -1/N and 1/M."""
    return torch.full_like(pos, -1 / len(pos)), torch.full_like(neg, 1 / len(neg))


@EVERY_VARIANT
def test_exponent_too_small_for_its_reciprocal_counts_as_zero(variant):
    pos, neg = energies(4, 3, dtype=torch.float32)
    for beta in (1e-36, -1e-320, torch.tensor(1e-36), torch.tensor(-1e-50, dtype=torch.float64)):
        loss = contrastive_loss(pos, neg, beta, variant=variant)
        torch.testing.assert_close(loss, neg.mean() - pos.mean())
        for sides in both_slopes(pos, neg, beta, variant=variant):
            torch.testing.assert_close(sides, _plain(pos, neg))


@pytest.mark.parametrize("beta", [0.5, -0.5])
def test_grad_scale_runs_to_zero_and_one_when_one_side_is_out_of_reach(beta):
    pos, neg = energies(4, 3)
    apart = 1e5 * (1 if beta > 0 else -1)
    for variant in VARIANTS:
        lost = slopes(contrastive_loss(pos + apart, neg, beta, variant=variant), pos, neg)
        vanishes = variant != "no_pos"
        assert all((side == 0).all() == vanishes for side in lost)
        found = slopes(contrastive_loss(pos - apart, neg, beta, variant=variant), pos, neg)
        torch.testing.assert_close(found[0], _plain(pos, neg)[0], **EXACT)
        torch.testing.assert_close(found[1], weights(neg, beta).detach(), **EXACT)
    assert grad_scale(pos + apart, neg, beta) == 0
    assert grad_scale(pos - apart, neg, beta) == 1


@EVERY_VARIANT
def test_reads_no_value_on_the_host_and_brings_the_exponent_to_the_energies(variant):
    # Meta tensors have no values: a read, a boolean index or a stray device would raise.
    pos = torch.empty(4, device="meta", requires_grad=True)
    neg = torch.empty(3, device="meta", requires_grad=True)
    log_q = torch.empty(4, device="meta"), torch.empty(3, device="meta")
    for beta in (0.5, torch.tensor(0.5), torch.tensor(0.5, device="meta")):
        for q in (None, log_q):
            loss = contrastive_loss(pos, neg, beta, variant=variant, log_q=q)
            assert loss.device.type == "meta"
            assert [g.shape for g in slopes(loss, pos, neg)] == [(4,), (3,)]
        assert coefficients(pos, neg, beta, variant=variant)[1].shape == (3,)
        assert weights(neg, beta).device == grad_scale(pos, neg, beta).device == neg.device


# -- GradScale (App. E and F) --------------------------------------------------------------------


@EVERY_VARIANT
@pytest.mark.parametrize("m", [1, 5, 64])
def test_the_positive_as_a_negative_is_a_factor_on_the_rate_at_zero_exponent(variant, m):
    pos, neg = energies(6, m)
    limit = 1.0 if variant == "no_pos" else m / (m + 1)
    for beta in (1e-9, -1e-9):
        found = slopes(contrastive_loss(pos, neg, beta, variant=variant), pos, neg)
        for side, plain in zip(found, _plain(pos, neg), strict=True):
            torch.testing.assert_close(side, limit * plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5, -3.0, torch.tensor(2.0)])
@pytest.mark.parametrize("m", [1, 3, 64])
def test_grad_scale_is_m_of_m_plus_1_where_all_energies_agree(m, beta):
    pos, neg = (torch.full((n,), 7.25, dtype=torch.float64) for n in (5, m))
    expected = torch.tensor(m / (m + 1), dtype=torch.float64)
    torch.testing.assert_close(grad_scale(pos, neg, beta), expected, **EXACT)


# -- what an optimizer makes of the gradient (App. G and H) --------------------------------------


def _path(
    optimizer: Callable[..., torch.optim.Optimizer], gradients: list[float], **options: Any
) -> Tensor:
    """Where a parameter is after each step of size 1, given its gradients."""
    at = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    stepper = optimizer([at], lr=1.0, **options)
    places = []
    for gradient in gradients:
        at.grad = torch.tensor([gradient], dtype=torch.float64)
        stepper.step()
        places.append(at.detach().clone())
    return torch.cat(places)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 2.0])
def test_parameters_stay_to_the_bit_where_all_negatives_fail_unless_beta_is_zero(beta):
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=0.1)
    x_pos, x_neg = energies(4, 3)
    for _ in range(3):
        optimizer.zero_grad()
        f_pos, f_neg = (theta[0] * x + theta[1] * x**2 for x in (x_pos, x_neg))
        contrastive_loss(f_pos + 1e5, f_neg, beta).backward()
        optimizer.step()
    assert (theta == 1).all() == (beta > 0)


def test_adam_undoes_a_grad_scale_that_stays_small_and_runs_on_when_it_turns_zero():
    gradients = torch.randn(500, generator=torch.Generator().manual_seed(0)).tolist()
    small = [1e-9 * gradient for gradient in gradients]
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    found = _path(adam, small, eps=1e-300)
    torch.testing.assert_close(found, _path(adam, gradients, eps=1e-300), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(_path(sgd, small), 1e-9 * _path(sgd, gradients))

    after = _path(adam, [1.0] * 50 + [0.0] * 500).diff()[49:]
    k = torch.arange(1, 501).double()
    mean = 0.9**k * (1 - 0.9**50) / (1 - 0.9 ** (50 + k))
    square = 0.999**k * (1 - 0.999**50) / (1 - 0.999 ** (50 + k))
    torch.testing.assert_close(after, -mean / square.sqrt(), rtol=1e-6, atol=1e-12)
    assert 9 < -after.sum() < 11


def test_adam_multiplies_the_last_layers_rate_by_the_output_scale():
    """A scale o on f, explicit or by the noise, is a last layer times o and its rate times o."""
    o, rate = 20_000.0, 1e-3
    generator = torch.Generator().manual_seed(0)
    x_pos, x_neg = (torch.randn(n, 3, generator=generator).double() for n in (6, 5))
    hidden = torch.randn(3, 4, generator=generator).double()
    last = torch.randn(4, generator=generator).double() / o

    def trained(factor: float, beta: float) -> tuple[Tensor, Tensor]:
        layers = [(hidden * 1.0).requires_grad_(), (factor * last).requires_grad_()]
        groups: list[dict[str, Any]] = [
            {"params": [layers[0]]},
            {"params": [layers[1]], "lr": factor * rate},
        ]
        optimizer = torch.optim.Adam(groups, lr=rate, eps=1e-300)
        for _ in range(50):
            optimizer.zero_grad()
            contrastive_loss(
                (x_pos @ layers[0]).tanh() @ layers[1], (x_neg @ layers[0]).tanh() @ layers[1], beta
            ).backward()
            optimizer.step()
        return layers[0].detach(), layers[1].detach()

    implicit, explicit = trained(1.0, 0.5 * o), trained(o, 0.5)
    torch.testing.assert_close(implicit[0], explicit[0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(o * implicit[1], explicit[1], rtol=1e-6, atol=1e-6)
    assert (implicit[0] - hidden).abs().max() > 0.01
    assert (o * (implicit[1] - last)).abs().max() > 100 * rate
