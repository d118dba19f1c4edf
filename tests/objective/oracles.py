"""Textbook forms of the objective in 80-digit decimals: slow, naive, nothing shared with torch.

The last three functions are for tests: energies, and the slopes that the forms are held against.

No shift, no log-sum-exp trick, no masks: exponentials of the energies as the formulas print them.
A gradient comes in two independent ways, as the closed form and as a difference quotient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ebmguard.energies import Variant
from ebmguard.objective import coefficients, contrastive_loss

P = ParamSpec("P")
R = TypeVar("R")
Numbers = Sequence[Decimal]
Scales = tuple[Decimal, Decimal]

VARIANTS: tuple[Variant, ...] = ("default", "no_pos", "batch", "true")
_CONTEXT = Context(prec=80, Emax=MAX_EMAX, Emin=MIN_EMIN)
_STEP = Decimal("1e-25")


def _precise(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with localcontext(_CONTEXT):
            return function(*args, **kwargs)

    return inner


def decimals(x: Tensor | Sequence[float]) -> list[Decimal]:
    """The exact values of a vector."""
    values = x.tolist() if isinstance(x, Tensor) else x
    return [Decimal(value) for value in values]


def _mean(values: Numbers) -> Decimal:
    return sum(values, Decimal(0)) / len(values)


def _partition(neg: Numbers, beta: Decimal) -> Decimal:
    return sum(((beta * f).exp() for f in neg), Decimal(0))


@_precise
def weights(neg: Numbers, beta: Decimal) -> list[Decimal]:
    """w_j = exp(β f⁻_j) / Σ_k exp(β f⁻_k)."""
    total = _partition(neg, beta)
    return [(beta * f).exp() / total for f in neg]


@_precise
def positive_weights(pos: Numbers, neg: Numbers, beta: Decimal) -> list[Decimal]:
    """w⁺_i = exp(β f⁺_i) / (exp(β f⁺_i) + Σ_j exp(β f⁻_j))."""
    total = _partition(neg, beta)
    return [(beta * f).exp() / ((beta * f).exp() + total) for f in pos]


@_precise
def grad_scale(pos: Numbers, neg: Numbers, beta: Decimal) -> Decimal:
    """The mean of 1 - w⁺_i, as printed."""
    return _mean([1 - w for w in positive_weights(pos, neg, beta)])


@_precise
def scales(pos: Numbers, neg: Numbers, beta: Decimal, variant: str) -> Scales:
    """The GradScale that multiplies the first and the second half of the positives."""
    half = len(pos) // 2
    if variant == "batch":
        both = grad_scale(pos, neg, beta)
        return both, both
    if variant == "true":
        return grad_scale(pos[half:], neg, beta), grad_scale(pos[:half], neg, beta)
    return Decimal(1), Decimal(1)


@_precise
def loss(
    pos: Numbers, neg: Numbers, beta: Decimal, variant: str, held: Scales | None = None
) -> Decimal:
    """The loss as printed; ``held`` are the scales, which are not differentiated."""
    if beta == 0:
        return _mean(neg) - _mean(pos)
    total = _partition(neg, beta)
    if variant == "default":
        return _mean([-((beta * f).exp() / ((beta * f).exp() + total)).ln() / beta for f in pos])
    first_scale, second_scale = held or scales(pos, neg, beta, variant)
    free = total.ln() / beta
    if variant == "true":
        half = len(pos) // 2
        first, second = free - _mean(pos[:half]), free - _mean(pos[half:])
        return (first_scale * first + second_scale * second) / 2
    return first_scale * (free - _mean(pos))


@_precise
def gradient(
    pos: Numbers, neg: Numbers, beta: Decimal, variant: str
) -> tuple[list[Decimal], list[Decimal]]:
    """Closed forms: for default -(1 - w⁺_i)/N and GradScale · w_j."""
    n = len(pos)
    if beta == 0:
        return [Decimal(-1) / n] * n, [Decimal(1) / len(neg)] * len(neg)
    w = weights(neg, beta)
    if variant == "default":
        pulls = [(1 - w_pos) / n for w_pos in positive_weights(pos, neg, beta)]
    elif variant == "true":
        half = n // 2
        first, second = scales(pos, neg, beta, variant)
        pulls = [first / half / 2] * half + [second / (n - half) / 2] * (n - half)
    else:
        pulls = [scales(pos, neg, beta, variant)[0] / n] * n
    push = sum(pulls, Decimal(0))
    return [-pull for pull in pulls], [push * value for value in w]


@_precise
def quotient(
    pos: Numbers, neg: Numbers, beta: Decimal, variant: str
) -> tuple[list[Decimal], list[Decimal]]:
    """Central differences of :func:`loss`: good to some 45 digits."""
    held = scales(pos, neg, beta, variant)

    def slope(index: int) -> Decimal:
        values = []
        for sign in (1, -1):
            moved = [*pos, *neg]
            moved[index] += sign * _STEP
            values.append(loss(moved[: len(pos)], moved[len(pos) :], beta, variant, held))
        return (values[0] - values[1]) / (2 * _STEP)

    slopes = [slope(index) for index in range(len(pos) + len(neg))]
    return slopes[: len(pos)], slopes[len(pos) :]


@_precise
def relative_error(actual: Tensor | Numbers, expected: Numbers) -> float:
    """Largest |actual - expected| / |expected|, entry by entry."""
    found = decimals(actual) if isinstance(actual, Tensor) else list(actual)
    assert len(found) == len(expected)
    return float(
        max(
            abs(a - e) / abs(e) if e else Decimal(0 if a == e else "inf")
            for a, e in zip(found, expected, strict=True)
        )
    )


def energies(
    n: int,
    m: int,
    *,
    seed: int = 0,
    scale: float = 2.0,
    gap: float = 0.5,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """N positives and M negatives that differ from each other, leaves of a graph."""
    rng = torch.Generator().manual_seed(seed)
    pos = scale * torch.randn(n, generator=rng, dtype=torch.float64) + gap
    neg = scale * torch.randn(m, generator=rng, dtype=torch.float64)
    return pos.to(dtype).requires_grad_(), neg.to(dtype).requires_grad_()


def slopes(loss_value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients by autograd."""
    return torch.autograd.grad(loss_value.sum(), inputs)


def both_slopes(pos: Tensor, neg: Tensor, beta: Any, **options: Any) -> list[tuple[Tensor, ...]]:
    """Gradients of the loss, by autograd and in closed form."""
    loss_value = contrastive_loss(pos, neg, beta, **options)
    return [slopes(loss_value, pos, neg), coefficients(pos, neg, beta, **options)]
