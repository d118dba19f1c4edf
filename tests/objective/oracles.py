"""The objective as it is printed, in 80-digit decimals: slow, naive, nothing shared with torch.

No shift, no log-sum-exp trick, no masks: exponentials of the energies. A gradient comes in two
independent ways, as the closed form and as a difference quotient of the loss. The last functions
are for tests: energies, and the slopes that the forms are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ebmguard.energies import Variant
from ebmguard.objective import coefficients, contrastive_loss

P = ParamSpec("P")
R = TypeVar("R")
Numbers = Sequence[Decimal]

VARIANTS: tuple[Variant, ...] = ("default", "no_pos", "batch", "true")
OF_CLASSES: tuple[Variant, ...] = ("default", "no_pos")
_CONTEXT = Context(prec=80, Emax=MAX_EMAX, Emin=MIN_EMIN)
_STEP = Decimal("1e-25")


def _precise(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with localcontext(_CONTEXT):
            return function(*args, **kwargs)

    return inner


def decimals(x: Tensor | Sequence[float | Decimal]) -> list[Decimal]:
    """The exact values of a vector."""
    return [Decimal(value) for value in (x.tolist() if isinstance(x, Tensor) else x)]


@cache
def _exp(x: Decimal) -> Decimal:
    return x.exp()


def _mean(values: Numbers) -> Decimal:
    return sum(values, Decimal(0)) / len(values)


@dataclass(frozen=True)
class Textbook:
    """What is known of one batch; ``weights`` are those of the first positive's class."""

    loss: Decimal
    to_pos: list[Decimal]
    to_neg: list[Decimal]
    weights: list[Decimal]
    positive_weights: list[Decimal]
    grad_scale: Decimal
    pulls: list[Decimal]


@_precise
def textbook(
    pos: Tensor | Numbers,
    neg: Tensor | Numbers,
    beta_star: float | Decimal,
    variant: Variant = "default",
    *,
    log_q: tuple[Any, Any] | None = None,
    groups: tuple[Tensor, ...] | None = None,
    held: Numbers | None = None,
) -> Textbook:
    """Loss, gradient and weights; ``held`` are the pulls that a loss does not differentiate."""
    f_pos, f_neg, beta = decimals(pos), decimals(neg), Decimal(beta_star)
    n, m = len(f_pos), len(f_neg)
    if beta == 0:
        count, one = Decimal(m), Decimal(1)
        return Textbook(
            loss=_mean(f_neg) - _mean(f_pos),
            to_pos=[-one / n] * n,
            to_neg=[one / count] * m,
            weights=[one / count] * m,
            positive_weights=[one / (count + 1)] * n,
            grad_scale=count / (count + 1),
            pulls=[one / n] * n,
        )
    q_pos, q_neg = map(decimals, log_q or ([0] * n, [0] * m))
    y_pos, y_neg, *scales = (x.tolist() for x in groups or (torch.zeros(n), torch.zeros(m)))
    betas = [beta * s for s in decimals(scales[0])] if scales else [beta] * n
    # The mass of each negative beside each positive, if of its class; of all; and of the positive.
    rows = [
        [
            _exp(betas[i] * f_neg[j] - q_neg[j]) if y_neg[j] == y_pos[i] else Decimal(0)
            for j in range(m)
        ]
        for i in range(n)
    ]
    totals = [sum(row, Decimal(0)) for row in rows]
    own = [_exp(betas[i] * f_pos[i] - q_pos[i]) for i in range(n)]
    kept = [i for i in range(n) if totals[i]]
    w_pos = [own[i] / (own[i] + totals[i]) for i in range(n)]

    def missing(part: Sequence[int]) -> Decimal:
        """GradScale as printed: the mean of 1 - w⁺."""
        return _mean([1 - w_pos[i] for i in part])

    pulls = [Decimal(0)] * n
    first, second = kept[: n // 2], kept[n // 2 :]
    for part, other in ((first, second), (second, first)):
        for i in part:
            if variant == "default":
                pulls[i] = (1 - w_pos[i]) / len(kept)
            elif variant == "no_pos":
                pulls[i] = Decimal(1) / len(kept)
            elif variant == "batch":
                pulls[i] = missing(kept) / len(kept)
            else:
                pulls[i] = missing(other) / len(part) / 2
    if variant == "default":
        loss = _mean([-w_pos[i].ln() / betas[i] for i in kept])
    else:
        free = {i: (totals[i] / own[i]).ln() / betas[i] for i in kept}
        loss = sum(((held or pulls)[i] * free[i] for i in kept), Decimal(0))
    return Textbook(
        loss=loss,
        to_pos=[-pull for pull in pulls],
        to_neg=[
            sum((pulls[i] * rows[i][j] / totals[i] for i in kept), Decimal(0)) for j in range(m)
        ],
        weights=[mass / totals[0] for mass in rows[0]] if totals[0] else [],
        positive_weights=w_pos,
        grad_scale=missing(kept),
        pulls=pulls,
    )


@_precise
def quotient(pos: Tensor, neg: Tensor, *args: Any, **options: Any) -> list[list[Decimal]]:
    """Central differences of the loss: good to some 45 digits."""
    held = textbook(pos, neg, *args, **options).pulls
    sides = decimals(pos), decimals(neg)

    def value(side: int, at: int, step: Decimal) -> Decimal:
        moved = [list(f) for f in sides]
        moved[side][at] += step
        return textbook(moved[0], moved[1], *args, held=held, **options).loss

    return [
        [(value(k, i, _STEP) - value(k, i, -_STEP)) / (2 * _STEP) for i in range(len(sides[k]))]
        for k in (0, 1)
    ]


@_precise
def relative_error(actual: Tensor | Numbers, expected: Numbers | Decimal) -> float:
    """Largest |actual - expected| / |expected|, entry by entry."""
    right = [expected] if isinstance(expected, Decimal) else expected
    found = decimals(actual.detach().flatten() if isinstance(actual, Tensor) else actual)
    assert len(found) == len(right)
    return float(
        max(
            abs(a - e) / abs(e) if e else Decimal(0 if a == e else "inf")
            for a, e in zip(found, right, strict=True)
        )
    )


def energies(
    n: int,
    m: int,
    *,
    seed: int = 0,
    scale: float = 2.0,
    gap: float = 0.5,
    heads: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """N positives and M negatives that differ from each other, leaves of a graph."""
    rng = torch.Generator().manual_seed(seed)
    pos = scale * torch.randn(n, *heads, generator=rng, dtype=torch.float64) + gap
    neg = scale * torch.randn(m, *heads, generator=rng, dtype=torch.float64)
    return pos.to(dtype).requires_grad_(), neg.to(dtype).requires_grad_()


def proposal(n: int = 6, m: int = 7) -> tuple[Tensor, Tensor]:
    """Log q at both sides: no small correction."""
    pos, neg = energies(n, m, seed=5, gap=0.0)
    return pos.detach() - 1, neg.detach() - 1


def slopes(loss_value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients by autograd."""
    return torch.autograd.grad(loss_value.sum(), inputs)


def both_slopes(pos: Tensor, neg: Tensor, beta: Any, **options: Any) -> list[tuple[Tensor, ...]]:
    """Gradients of the loss, by autograd and as the coefficients."""
    loss_value = contrastive_loss(pos, neg, beta, **options)
    return [slopes(loss_value, pos, neg), coefficients(pos, neg, beta, **options)]
