"""Where a short run must start to end at a given image: z with M(z) = x, or as near as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from .density import NegativeEnergy, flow

ITERATIONS = 100
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


@dataclass(frozen=True)
class Inverse:
    """What `invert` found, for B images.

    Attributes:
        z: the start whose M(z) came nearest, shaped as the images.
        x: M(z).
        error: mean squared error of x over the entries of an image, (B,), in squared units of a
            pixel. Not 0 where an image is not reached: out of M's range, or not found.
        course: the least error so far, (iterations + 1, B): at z0, and after each iteration.
        stages: M(z) of the least error at the iterations asked for, (so many, B, ...).
    """

    z: Tensor
    x: Tensor
    error: Tensor
    course: Tensor
    stages: Tensor


def invert(
    f: NegativeEnergy,
    x: Tensor,
    *,
    steps: int,
    step_size: float,
    z0: Tensor,
    iterations: int = ITERATIONS,
    inside: bool = False,
    stages: Sequence[int] = (),
) -> Inverse:
    """Minimise |x - M(z)|^2 over z, each image by itself, M the K-step map `flow`.

    The reconstruction of Nijkamp et al. (2019), section 3.4, from z0 drawn of p_0. Theirs is
    gradient descent at a rate that they do not state. A trained M contracts some directions a
    thousandfold more than others, and a rate that one of them bears leaves the other where it was;
    hence `descend`, a quasi-Newton descent with the same gradient, which has no rate to choose. Its
    first step is z <- z + (x - M(z)) for a map that moves nothing.

    The gradient is the true one, -2 (dM/dz)^T (x - M(z)), through all K steps. Of a piecewise
    linear f (ReLU, leaky ReLU) dM/dz is the identity wherever it exists, and this gradient is the
    plain residual: the same descent is then the fixed-point iteration z <- z + eta (x - M(z)), with
    eta a matrix that is learned from the residuals' changes. The residual is no true slope across
    the kinks, and the descent can stop early; the error tells.

    An image out of M's range has no z, and keeps its error. Another may have several, of which this
    is the one that the descent from z0 leads to.

    Args:
        f, steps, step_size: of the map, as in `flow`.
        x: the images to reach, (B, ...).
        z0: where to start, shaped as x and of its type, which must be the type that f computes in;
            in [-1, 1] where z is kept there.
        iterations: evaluations of M and its gradient after the one at z0. Each takes some 4 times
            as long as M.
        inside: keep z in [-1, 1], where p_0 = U(-1, 1) is not 0, by projection.
        stages: iterations, 0 (z0) to `iterations`, whose M(z) is kept.

    Returns:
        The nearest, without a graph. Memory is that of K states and of the graph of one step.

    Raises:
        ConfigError: M(z0) is not finite.
    """
    target, shape = x.detach(), x.shape

    def objective(flat: Tensor) -> tuple[Tensor, Tensor]:
        residual, gradient = residual_and_gradient(
            f, flat.reshape(shape), target, steps=steps, step_size=step_size
        )
        return residual.flatten(1).square().sum(1), gradient.flatten(1)

    course: list[Tensor] = []
    kept: dict[int, Tensor] = {}
    # Of a map that moves nothing the second derivative is 2, and the first step the whole way.
    start, bound = z0.detach().flatten(1), 1.0 if inside else None
    for point in descend(objective, start, iterations=iterations, curvature=2.0, bound=bound):
        lost = int((~point.value.isfinite()).sum())
        if lost:
            raise ConfigError(
                f"M(z0) is not finite for {lost} of {len(x)} starts, after {steps} steps of size "
                f"{step_size:g}: nothing to descend from. Give a run whose network is not lost"
            )
        if len(course) in stages:
            kept[len(course)] = point.z
        course.append(point.value)
    # The descent ends where all images are at rest.
    course += course[-1:] * (iterations + 1 - len(course))
    errors, z = torch.stack(course) / target[:1].numel(), point.z
    ends = [z, *(kept.get(stage, z) for stage in stages)]
    shown = [flow(f, end.reshape(shape), steps=steps, step_size=step_size) for end in ends]
    return Inverse(z.reshape(shape), shown[0], errors[-1], errors, torch.stack(shown)[1:])


def residual_and_gradient(
    f: NegativeEnergy, z: Tensor, x: Tensor, *, steps: int, step_size: float
) -> tuple[Tensor, Tensor]:
    """M(z) - x, and the gradient of |M(z) - x|^2 in z, both shaped as z and without a graph.

    The states are kept and the steps run back through one at a time, so that memory does not hold
    the graph of K steps: for 64 CIFAR-10 images and a network of 64 channels that is some 20 GiB.
    """
    states = [z.detach()]
    for _ in range(steps):
        states.append(flow(f, states[-1], steps=1, step_size=step_size))
    residual = states.pop() - x
    gradient = 2 * residual
    for state in reversed(states):
        state.requires_grad_()
        with torch.enable_grad():
            after = flow(f, state, steps=1, step_size=step_size)
            (gradient,) = torch.autograd.grad(after, state, gradient)
    return residual, gradient


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
