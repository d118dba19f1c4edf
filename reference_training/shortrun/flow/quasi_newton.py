"""Quasi-Newton descent of many small problems at once, each by itself, with or without a box."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MEMORY = 20
"""Pairs of differences that a problem's curvature is learned from."""
SUFFICIENT = 1e-4
"""Armijo's constant: the share of the decrease that the slope promises which a step must bring."""
SHORTEN = (0.1, 0.5)
"""A step that failed is cut to between these shares of it."""
PATIENCE = 8
"""Failures in a row after which what was learned of the curvature is dropped; and after as many
more along the gradient itself the problem is at rest."""
CURVED = 1e-9
"""The least cosine between a pair's step and its change of gradient."""

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(B, D) to the values of B problems, (B,), and their gradients, (B, D)."""


class Point(NamedTuple):
    """Where the problems stand: the least value of each so far, (B,), and where it was, (B, D)."""

    z: Tensor
    value: Tensor


def descend(
    objective: Objective,
    z: Tensor,
    *,
    iterations: int,
    curvature: float = 1.0,
    bound: float | None = None,
) -> Iterator[Point]:
    """Limited-memory BFGS with Armijo's rule; projected on a box if there is one.

    Each iteration evaluates all problems once, at the one's new step and at the other's shortened
    one. In a box the entries that the gradient presses against a side are held, and curvature is
    that of the free ones (two-metric projection: Bertsekas, SIAM J. Control Optim. 20, 1982).
    A value that is not finite counts as a step that failed.

    Args:
        objective: values and gradients; a row's may depend on that row alone.
        z: where to start, (B, D), within the box.
        iterations: evaluations after the one at z.
        curvature: the second derivative to expect before anything is learned: the first step is
            the gradient divided by it.
        bound: every entry stays in [-bound, bound].

    Yields:
        The point at z, and after every iteration; fewer where all problems are at rest.
    """
    value, gradient = objective(z)
    yield Point(z, value)
    pairs = z.new_zeros((2, MEMORY, *z.shape))  # steps and changes of the gradient, newest first
    length, failures = torch.ones_like(value), torch.zeros_like(value)
    learned = resting = torch.zeros_like(value, dtype=torch.bool)
    for _ in range(iterations):
        tried = z + length[:, None] * _direction(z, gradient, pairs[0], pairs[1], curvature, bound)
        if bound is not None:
            tried = tried.clamp(-bound, bound)
        move = tried - z
        slope = (gradient * move).sum(1)
        new_value, new_gradient = objective(tried)
        good = (new_value <= value + SUFFICIENT * slope) & (slope < 0) & ~resting
        change = new_gradient - gradient
        curved = (move * change).sum(1) > CURVED * move.norm(dim=1) * change.norm(dim=1)
        newest = torch.stack((move, change))[:, None]
        pushed = torch.cat((newest, pairs[:, :-1]), 1)
        pairs = torch.where((good & curved)[:, None], pushed, pairs)
        learned = learned | (good & curved)
        # The least value of the parabola through both values, with the slope at z.
        lowest = -0.5 * slope / (new_value - value - slope)
        cut = torch.where(lowest.isfinite(), lowest.clamp(*SHORTEN), SHORTEN[0])
        length = torch.where(good, 1.0, length * cut)
        failures = torch.where(good, 0.0, failures + 1)
        z = torch.where(good[:, None], tried, z)
        value = torch.where(good, new_value, value)
        gradient = torch.where(good[:, None], new_gradient, gradient)
        yield Point(z, value)
        tired = failures >= PATIENCE
        resting = resting | (tired & ~learned)
        forget = tired & learned
        pairs = torch.where(forget[:, None], 0.0, pairs)
        learned = learned & ~forget
        length = torch.where(forget, 1.0, length)
        failures = torch.where(forget, 0.0, failures)
        if bool(resting.all()):
            return


def _direction(
    z: Tensor,
    gradient: Tensor,
    moves: Tensor,
    changes: Tensor,
    curvature: float,
    bound: float | None,
) -> Tensor:
    """Minus the inverse Hessian, as the pairs (newest first) tell it, times the gradient."""
    if bound is not None:
        pressed = ((z >= bound) & (gradient < 0)) | ((z <= -bound) & (gradient > 0))
        free = (~pressed).to(z.dtype)
        gradient, moves, changes = gradient * free, moves * free, changes * free
    products = (moves * changes).sum(-1)
    usable = products > CURVED * moves.norm(dim=-1) * changes.norm(dim=-1)
    inverse = torch.where(usable, 1 / products, 0.0)
    scale = torch.full_like(products[0], 1 / curvature)
    for i in reversed(range(len(moves))):
        squared = changes[i].square().sum(-1)
        scale = torch.where(usable[i], products[i] / squared, scale)
    way = gradient
    shares = []
    for i in range(len(moves)):
        share = inverse[i] * (moves[i] * way).sum(-1)
        way = way - share[:, None] * changes[i]
        shares.append(share)
    way = scale[:, None] * way
    for i in reversed(range(len(moves))):
        back = inverse[i] * (changes[i] * way).sum(-1)
        way = way + (shares[i] - back)[:, None] * moves[i]
    return -way
