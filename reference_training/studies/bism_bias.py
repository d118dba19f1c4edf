"""How far the unrolled gradient is from the exact one, and how far it can be.

The lower level of an RBM has its end in closed form, phi*: logits b_h + v^T W. With it BiSM's upper
loss is score matching of the free energy, whose gradient g* in theta has no bias. Through N steps

    g_N - g* = [J_theta(phi_N) - J_theta(phi*)] + D_N^T [J_phi(phi_N) - J_phi(phi*)]
               + (D_N - D*)^T J_phi(phi*),

of the upper loss J and D = d phi / d theta. So, with C the largest spectral norm of a second
derivative of J on the way from phi* to phi_N,

    |g_N - g*| <= (C_theta,phi + |D_N| C_phi,phi) |phi_N - phi*| + |D_N - D*| |J_phi(phi*)|.

This is a bound of our own, with constants measured where they are needed. Where phi* is not known,
|phi_N - phi*| <= |phi_N - phi_0| r / (1 - r), if the N steps leave a part r < 1 of the distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..bism.bilevel import Parameters
from ..bism.methods import Levels
from ..bism.rbm import GaussianBernoulliRBM

_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)


def exact_posterior(model: GaussianBernoulliRBM) -> Parameters:
    """phi*, the parameters of a :class:`..BernoulliPosterior`, differentiable in the model's."""
    return {"weight": model.weight.T, "bias": model.hidden_bias}


def gradient_bias(model: GaussianBernoulliRBM, levels: Levels) -> tuple[dict[str, float], Tensor]:
    """Of one minibatch, everything at the same random numbers.

    Returns:
        norms by name: ``drift``, |phi_N - phi_0|; ``distance``, |phi_N - phi*|; ``left``, that over
        |phi_0 - phi*|; ``gradient``, |g*|; ``error``, |g_N - g*|; ``bound``, on the error. And
        g_N - g*, ``(P,)``.
    """
    theta, exact = list(model.parameters()), exact_posterior(model)
    before, after, upper = levels
    names = list(before)
    start, end, goal = (_flat([phi[n] for n in names]) for phi in (before, after, exact))
    unrolled, best = (_gradient(upper(phi), theta) for phi in (after, exact))

    def slopes(place: float) -> tuple[Tensor, Tensor, Tensor]:
        """J_phi, and its derivatives in theta and phi."""
        phi = {n: torch.lerp(exact[n], after[n], place).detach().requires_grad_() for n in names}
        leaves = [phi[n] for n in names]
        slope = _flat(torch.autograd.grad(upper(phi), leaves, create_graph=True))
        return slope.detach(), _jacobian(slope, theta), _jacobian(slope, leaves)

    places = [slopes(place) for place in _PLACES]
    mixed, own = (max(_size(each[i]) for each in places) for i in (1, 2))
    moved, ideal = _jacobian(end, theta), _jacobian(goal, theta)
    start, end, goal = start.detach(), end.detach(), goal.detach()
    distance, error = float((end - goal).norm()), unrolled - best
    bound = (mixed + _size(moved) * own) * distance
    bound += _size(moved - ideal) * float(places[0][0].norm())
    norms = {
        "drift": float((end - start).norm()),
        "distance": distance,
        "left": distance / float((start - goal).norm()),
        "gradient": float(best.norm()),
        "error": float(error.norm()),
        "bound": bound,
    }
    return norms, error


def measured(model: GaussianBernoulliRBM, batches: Iterable[Levels]) -> dict[str, float]:
    """Means of :func:`gradient_bias` over at least two minibatches.

    Returns:
        its norms, and ``bias``, the norm of the mean of g_N - g*, with ``bias_error``, the standard
        error of that mean over all its entries.
    """
    found = [gradient_bias(model, levels) for levels in batches]
    errors = torch.stack([error for _, error in found])
    return {
        **{name: sum(norms[name] for norms, _ in found) / len(found) for name in found[0][0]},
        "bias": float(errors.mean(0).norm()),
        "bias_error": math.sqrt(float(errors.var(0).sum()) / len(found)),
    }


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _gradient(y: Tensor, x: Sequence[Tensor]) -> Tensor:
    return _flat(torch.autograd.grad(y, x, retain_graph=True, materialize_grads=True)).detach()


def _jacobian(y: Tensor, x: Sequence[Tensor]) -> Tensor:
    """``(len(y), entries of x)``; 0 where y does not depend on x."""
    if not y.requires_grad:
        return y.new_zeros(len(y), sum(each.numel() for each in x))
    return torch.stack([_gradient(each, x) for each in y])


def _size(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
