"""Second derivatives: numeric checks, and Hessians against textbook forms without any tricks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard.objective import contrastive_loss, grad_scale
from tests.objective.oracles import OF_CLASSES, VARIANTS, energies, proposal

EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def _textbook(pos, neg, beta, variant, at, log_q):
    """The losses with a GradScale in plain torch, where it is what it is at ``at``."""
    r_pos, r_neg = beta * pos - log_q[0], beta * neg - log_q[1]
    costs = (r_neg.exp().sum().log() - r_pos) / beta

    def scale(part):
        return grad_scale(at[0][part], at[1], beta, log_q=(log_q[0][part], log_q[1]))

    everyone, half = slice(None), len(pos) // 2
    first, second = slice(0, half), slice(half, None)
    if variant == "batch":
        return scale(everyone) * costs.mean()
    return 0.5 * (scale(second) * costs[first].mean() + scale(first) * costs[second].mean())


def _hessian(function, pos, neg):
    blocks = torch.autograd.functional.hessian(function, (pos.detach(), neg.detach()))
    return torch.cat([torch.cat(row, 1) for row in blocks], 0)


@pytest.mark.parametrize("variant", ["batch", "true"])
def test_hessian_is_that_of_the_textbook_form(variant):
    pos, neg = energies(4, 3)
    at = pos.detach(), neg.detach()
    for beta in (0.7, -0.7):
        for log_q in (None, proposal(4, 3)):
            q = log_q or (torch.zeros(4), torch.zeros(3))
            found = _hessian(
                lambda p, n, beta=beta, log_q=log_q: contrastive_loss(
                    p, n, beta, variant=variant, log_q=log_q
                ),
                pos,
                neg,
            )
            expected = _hessian(
                lambda p, n, beta=beta, q=q: _textbook(p, n, beta, variant, at, q), pos, neg
            )
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
            assert found.abs().max() > 1e-3


@pytest.mark.parametrize("options", ["plain", "heads", "classes", "log q"])
@pytest.mark.parametrize("variant", OF_CLASSES)
def test_numeric_first_and_second_derivatives(variant, options):
    pos, neg = energies(4, 3, heads=(2,) if options == "heads" else ())
    known: dict[str, Any] = {
        "classes": {"groups": (torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 1]))},
        "log q": {"log_q": proposal(4, 3)},
    }
    given = known.get(options, {})
    for beta in (-0.7, torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.0)):

        def loss(p, n, beta=beta):
            return contrastive_loss(p, n, beta, variant=variant, **given)

        assert torch.autograd.gradcheck(loss, (pos, neg))
        assert torch.autograd.gradgradcheck(loss, (pos, neg))


@EVERY_VARIANT
def test_function_transforms(variant):
    pos, neg = (f.detach() for f in energies(4, 3))

    def loss(p, n):
        return contrastive_loss(p, n, 0.7, variant=variant)

    leaves = pos.clone().requires_grad_(), neg.clone().requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, argnums=(0, 1))(pos, neg)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    second = torch.func.jacrev(torch.func.jacrev(loss))(pos, neg)
    reference = torch.autograd.functional.hessian(lambda p: loss(p, neg), pos)
    torch.testing.assert_close(second, reference, rtol=1e-12, atol=1e-16)
