"""What a state of a run tells of its next steps: curvatures of f and of the loss, probe chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Product = Callable[[Tensor], Tensor]
ITERATIONS = 50


def largest_sizes(product: Product, start: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Of symmetric matrices, how large the largest eigenvalue is without its sign: ``(B,)``.

    Power iteration: ‖H v‖ of the last vector, from below, and the closer the smaller the next
    eigenvalue is beside it. Two that differ in the sign alone do no harm.

    Args:
        product: each matrix times its vector, ``(B, n)`` to ``(B, n)``.
        start: vectors that are no eigenvectors, ``(B, n)``, such as random ones.
    """
    sizes: Tensor = torch.linalg.vector_norm(_iterated(product, start, iterations), dim=1)
    return sizes


def top_eigenvalues(
    product: Product, start: Tensor, sizes: Tensor, iterations: int = ITERATIONS
) -> Tensor:
    """The largest eigenvalue with regard to the sign, ``(B,)``: of the matrices plus their sizes.

    Args:
        product, start, iterations: as for :func:`largest_sizes`.
        sizes: what that returned.
    """
    image = _iterated(lambda v: product(v) + sizes[:, None] * v, start, iterations)
    top: Tensor = torch.linalg.vector_norm(image, dim=1) - sizes
    return top


def _iterated(product: Product, start: Tensor, iterations: int) -> Tensor:
    image = start
    for _ in range(iterations):
        image = product(torch.nn.functional.normalize(image, dim=1))
    return image


def hessian_of_f(f: Callable[[Tensor], Tensor], x: Tensor) -> Product:
    """Products with the Hessians of f in each of its samples x, (B, ...), by double backward."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)

    def product(v: Tensor) -> Tensor:
        inner = (gradient * v.reshape(x.shape)).sum()
        return torch.autograd.grad(inner, x, retain_graph=True)[0].flatten(1)

    return product


def hessian_of_loss(
    loss: Tensor, parameters: Sequence[Tensor], scales: Sequence[Tensor]
) -> Product:
    """Products with P^-1/2 H P^-1/2, where H is the Hessian of the loss: ``(1, n)`` to ``(1, n)``.

    Args:
        loss: with a graph to the parameters.
        scales: P's diagonal, as :func:`preconditioner` returns it.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([g.flatten() for g in gradients])
    root = torch.cat([s.flatten() for s in scales]).rsqrt()

    def product(v: Tensor) -> Tensor:
        inner = (gradient * (root * v[0])).sum()
        found = torch.autograd.grad(inner, parameters, retain_graph=True, materialize_grads=True)
        return (root * torch.cat([h.flatten() for h in found]))[None]

    return product


def preconditioner(optimizer: Optimizer) -> list[Tensor]:
    """By what an optimizer's step divides each entry: Adam's sqrt(v) + eps, v unbiased; else 1."""
    scales = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state: Mapping[str, Any] = optimizer.state.get(p, {})
            if "exp_avg_sq" not in state:
                scales.append(torch.ones_like(p))
                continue
            v = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
            scales.append(v.sqrt() + group["eps"])
    return scales
