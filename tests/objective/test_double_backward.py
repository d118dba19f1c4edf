"""Second derivatives: numeric checks, and Hessians against textbook forms without any tricks."""

from __future__ import annotations

import pytest
import torch

from ebmguard.objective import contrastive_loss, grad_scale
from tests.objective.oracles import VARIANTS, energies

BETAS = [0.7, -0.7]


def _textbook(pos, neg, beta, variant, at):
    """The losses in plain torch, GradScale as the constants that it has at ``at``."""
    log_sum = (beta * neg).exp().sum().log()
    if variant == "default":
        return (torch.logaddexp(log_sum, beta * pos) / beta - pos).mean()
    if variant == "no_pos":
        return log_sum / beta - pos.mean()
    half = len(pos) // 2
    fixed_pos, fixed_neg = at
    if variant == "batch":
        return grad_scale(fixed_pos, fixed_neg, beta) * (log_sum / beta - pos.mean())
    first = log_sum / beta - pos[:half].mean()
    second = log_sum / beta - pos[half:].mean()
    return 0.5 * (
        grad_scale(fixed_pos[half:], fixed_neg, beta) * first
        + grad_scale(fixed_pos[:half], fixed_neg, beta) * second
    )


def _hessian(function, pos, neg):
    blocks = torch.autograd.functional.hessian(function, (pos.detach(), neg.detach()))
    return torch.cat([torch.cat(row, 1) for row in blocks], 0)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hessian_is_that_of_the_textbook_form(variant, beta):
    pos, neg = energies(4, 3)
    at = pos.detach(), neg.detach()
    found = _hessian(lambda p, n: contrastive_loss(p, n, beta, variant=variant), pos, neg)
    expected = _hessian(lambda p, n: _textbook(p, n, beta, variant, at), pos, neg)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("beta", [0.7, -0.7, torch.tensor(0.7, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("variant", ["default", "no_pos"])
def test_numeric_first_and_second_derivatives(variant, beta):
    pos, neg = energies(4, 3)

    def loss(p, n):
        return contrastive_loss(p, n, beta, variant=variant)

    assert torch.autograd.gradcheck(loss, (pos, neg))
    assert torch.autograd.gradgradcheck(loss, (pos, neg))


def test_numeric_derivatives_of_batch_apart_from_its_detached_scale():
    pos, neg = energies(4, 3)

    def loss(p, n):
        return contrastive_loss(p, n, 0.7, variant="batch") / grad_scale(p, n, 0.7).detach()

    assert torch.autograd.gradcheck(loss, (pos, neg))
    assert torch.autograd.gradgradcheck(loss, (pos, neg))


@pytest.mark.parametrize("variant", ["default", "no_pos"])
def test_numeric_derivatives_with_model_dimensions_heads_and_groups(variant):
    betas = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64)
    pos, neg = energies(12, 9)
    groups = (torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 1]))

    def ensemble(p, n):
        return contrastive_loss(p.reshape(3, 4), n.reshape(3, 3), betas, variant=variant)

    def heads(p, n):
        return contrastive_loss(p.reshape(4, 3), n.reshape(3, 3), 0.5, variant=variant)

    def classes(p, n):
        return contrastive_loss(
            p.reshape(4, 3), n.reshape(3, 3), 0.5, variant=variant, groups=groups, reduce="mean"
        )

    for loss in (ensemble, heads, classes):
        assert torch.autograd.gradcheck(loss, (pos, neg))
        assert torch.autograd.gradgradcheck(loss, (pos, neg))


@pytest.mark.parametrize("variant", VARIANTS)
def test_function_transforms(variant):
    pos, neg = (f.detach() for f in energies(4, 3))

    def loss(p, n):
        return contrastive_loss(p, n, 0.7, variant=variant)

    leaves = pos.clone().requires_grad_(), neg.clone().requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, argnums=(0, 1))(pos, neg)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    # One call per member under vmap is what a β* tensor over model dimensions does in one call.
    stacked = torch.stack([pos, pos + 1, -pos]), torch.stack([neg, 2 * neg, neg])
    mapped = torch.func.vmap(loss)(*stacked)
    ensemble = contrastive_loss(
        *stacked, torch.full((3,), 0.7, dtype=torch.float64), variant=variant
    )
    torch.testing.assert_close(mapped, ensemble, rtol=1e-13, atol=0)
    second = torch.func.jacrev(torch.func.jacrev(loss))(pos, neg)
    reference = torch.autograd.functional.hessian(lambda p: loss(p, neg), pos)
    torch.testing.assert_close(second, reference, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_penalty_on_the_input_gradient_trains_the_network(variant):
    # The use of double backward: a loss on d(contrastive loss)/dx, differentiated in θ.
    theta = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    x_pos, x_neg = (f.detach().requires_grad_() for f in energies(4, 3))

    def energy(x, t):
        return t[0] * x.sin() + t[1] * x.square() + t[2] * x

    def penalty(t):
        loss = contrastive_loss(energy(x_pos, t), energy(x_neg, t), 0.7, variant=variant)
        sides = torch.autograd.grad(loss, (x_pos, x_neg), create_graph=True)
        return sides[0].square().sum() + sides[1].square().sum()

    (found,) = torch.autograd.grad(penalty(theta), theta)
    assert found.isfinite().all()
    assert found.abs().min() > 0
    if variant in ("default", "no_pos"):  # the others hold GradScale
        assert torch.autograd.gradcheck(penalty, theta)
