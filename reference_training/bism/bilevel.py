"""The bi-level update: a model trained through the posterior's own training.

Lower level: K Adam steps on the posterior's parameters phi, which are kept as phi_0. Upper level: N
more, unrolled, to phi_N, and the gradient in the model's parameters theta through them; phi_N is
thrown away. N = 0 is plain alternation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BETAS", "Moments", "Parameters", "adam_step", "descend"]

Parameters = dict[str, Tensor]
BETAS, EPS, EPS_ROOT = (0.9, 0.95), 1e-8, 1e-16


class Moments(NamedTuple):
    """Adam's state: steps done, and running means of the gradients and of their squares."""

    steps: int
    first: Parameters
    second: Parameters

    @classmethod
    def none(cls, parameters: Parameters) -> Moments:
        """Before the first step."""
        zeros = {name: torch.zeros_like(x) for name, x in parameters.items()}
        return cls(0, zeros, zeros)


def adam_step(
    parameters: Parameters, gradients: Parameters, moments: Moments, lr: float
) -> tuple[Parameters, Moments]:
    """Adam (Kingma and Ba 2015) as a function, so that steps can be differentiated.

    EPS_ROOT keeps the derivative finite where a gradient is 0, as those of an input that is always
    0 are; PyTorch's ``differentiable=True`` has no such term. torchopt has it, but no wheels for
    the newer versions of Python.
    """
    rate_1, rate_2 = BETAS
    done = moments.steps + 1
    first = {n: torch.lerp(g, moments.first[n], rate_1) for n, g in gradients.items()}
    second = {n: torch.lerp(g * g, moments.second[n], rate_2) for n, g in gradients.items()}
    size, spread = lr / (1 - rate_1**done), 1 - rate_2**done
    after = {
        n: x - size * first[n] / ((second[n] / spread + EPS_ROOT).sqrt() + EPS)
        for n, x in parameters.items()
    }
    return after, Moments(done, first, second)


def descend(
    loss: Callable[[Parameters], Tensor],
    parameters: Parameters,
    moments: Moments,
    lr: float,
    steps: int,
    *,
    unrolled: bool = False,
    averages: Callable[[Sequence[Tensor]], Sequence[Tensor]] = list,
) -> tuple[Parameters, Moments]:
    """Parameters and moments after so many steps of Adam on ``loss``.

    Args:
        loss: of the parameters, a scalar; called once a step, it may draw random numbers.
        parameters, moments: where to begin, which stays as it is.
        lr, steps: how to go on.
        unrolled: keep the graph, so that what comes out can be differentiated in whatever the loss
            depends on. Otherwise it is detached.
        averages: of gradients over those who do the same with other data; none by default.
    """
    for _ in range(steps):
        kept = unrolled and all(x.requires_grad for x in parameters.values())
        leaves = parameters
        if not kept:
            leaves = {name: x.detach().requires_grad_() for name, x in parameters.items()}
        found = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=unrolled)
        with torch.set_grad_enabled(unrolled):
            gradients = dict(zip(leaves, averages(found), strict=True))
            parameters, moments = adam_step(leaves, gradients, moments, lr)
    return parameters, moments
