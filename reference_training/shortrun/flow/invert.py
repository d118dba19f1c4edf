"""Where a short run must start to end at a given image: z with M(z) = x, or as near as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from .density import NegativeEnergy, flow
from .quasi_newton import descend

ITERATIONS = 100


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
