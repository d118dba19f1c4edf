"""Paths between samples: noise is turned into other noise, and the flow maps all of it to images.

Nijkamp et al. (2019), section 3.4: z_rho = rho z1 + sqrt(1 - rho^2) z2, x = M(z_rho).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..flow.flow_map import flow
from .measured import BATCH, Measured, measure, some_of

if TYPE_CHECKING:
    from ..trained import TrainedRun

POINTS = 21
"""Of a path. Odd, so that every other one of them makes a path from end to end too."""


class Course(NamedTuple):
    """How evenly a path goes from one end to the other; each (P,), float64, on the CPU.

    Attributes:
        apart: root mean square difference of its ends.
        length: of all its steps, over the distance of its ends; 1 is a straight line.
        largest: step, over the mean step; 1 is an even path.
        halved: its largest step over that of every other point. Towards 1/2, the path is smooth at
            this spacing; near 1, it jumps, and no spacing is fine enough.
        steps: (P, N - 1), of each step the length over the distance of the ends.
    """

    apart: Tensor
    length: Tensor
    largest: Tensor
    halved: Tensor
    steps: Tensor


@dataclass(frozen=True)
class Paths:
    """P paths of N points, rho from 0 to 1.

    Attributes:
        run: whose flow.
        rho: (N,) ascending.
        starts: (P, N, C, H, W) z_rho.
        images: M(z_rho); blends: straight lines between the same ends.
        held_out: test images.
        on_path, on_blend: numbers of all images, in the order of (P, N).
    """

    run: TrainedRun
    rho: Tensor
    starts: Tensor
    images: Tensor
    blends: Tensor
    held_out: Measured
    on_path: Measured
    on_blend: Measured

    def along(self, name: str, *, blend: bool = False) -> Tensor:
        """A number along the paths, (P, N)."""
        return (self.on_blend if blend else self.on_path).each[name].reshape(self.images.shape[:2])

    @property
    def convex(self) -> Tensor:
        """(P, N, C, H, W) straight lines between the starts, which no flow was run from."""
        return straight(self.starts)

    def inside(self, name: str, *, blend: bool = False) -> float:
        """Its mean between the ends."""
        return self.along(name, blend=blend)[:, 1:-1].mean().item()


def arc(points: int) -> Tensor:
    """rho = sin(angle) for even angles from 0 to a right one, (points,) float64.

    On z_rho = rho z1 + sqrt(1 - rho^2) z2 even angles are even steps. Even steps of rho are not: of
    ten the last one alone goes over 29% of the way.
    """
    return torch.sin(torch.linspace(0, math.pi / 2, points, dtype=torch.float64))


def between(z1: Tensor, z2: Tensor, rho: Tensor) -> Tensor:
    """rho z1 + sqrt(1 - rho^2) z2: z2 at rho = 0, z1 at 1; the variance of both where they agree.

    Args:
        z1, z2: (P, ...), independent of each other.
        rho: (N,) in [0, 1].

    Returns:
        (P, N, ...). Entries of z1 and z2 in [-1, 1] give entries up to sqrt(2).
    """
    shape = (1, -1, *[1] * (z1.ndim - 1))
    first = rho.to(z1).reshape(shape)
    second = (1 - rho.square()).clamp(min=0).sqrt().to(z1).reshape(shape)
    return first * z1[:, None] + second * z2[:, None]


def straight(path: Tensor) -> Tensor:
    """Even steps on the straight line between the ends of paths, (P, N, ...), shaped as they."""
    share = torch.linspace(0, 1, path.shape[1], dtype=path.dtype, device=path.device)
    return torch.lerp(path[:, :1], path[:, -1:], share.reshape(1, -1, *[1] * (path.ndim - 2)))


def course(path: Tensor) -> Course:
    """How evenly paths go, (P, N, ...) with an odd N of 3 or more."""
    points = path.detach().cpu().double().flatten(2)
    steps = _lengths(points)
    apart = (points[:, -1] - points[:, 0]).square().mean(dim=-1).sqrt()
    largest = steps.amax(dim=1)
    return Course(
        apart=apart,
        length=steps.sum(dim=1) / apart,
        largest=largest / steps.mean(dim=1),
        halved=largest / _lengths(points[:, ::2]).amax(dim=1),
        steps=steps / apart[:, None],
    )


def outside(z: Tensor) -> Tensor:
    """Share of the entries outside the cube [-1, 1] at each point of the paths, (P, N, ...): (N,).

    For uniform z1 and z2 it is (a + b - 1)^2 / (4 a b) on the mean, with a = rho and
    b = sqrt(1 - rho^2): 8.6% where they are equal.
    """
    return (z.abs() > 1).cpu().double().transpose(0, 1).flatten(1).mean(dim=1)


def spread(z: Tensor) -> Tensor:
    """Root mean square entry at each point of the paths, over that at their ends: (N,)."""
    squares = z.cpu().double().square().transpose(0, 1).flatten(1).mean(dim=1)
    return (squares / squares[[0, -1]].mean()).sqrt()


def interpolate(run: TrainedRun, *, count: int, seed: int) -> Paths:
    """Paths between pairs of starts, and their images by the flow of training's K without noise.

    Args:
        run: whose flow.
        count: pairs.
        seed: of the starts, and of the test images that the paths are held against.
    """
    generator = torch.Generator(run.device).manual_seed(seed)
    z1, z2 = run.starts(2 * count, generator).chunk(2)
    rho = arc(POINTS)
    starts = between(z1, z2, rho)
    parts = [
        flow(run.network, part, steps=run.settings.sgld_steps, step_size=run.step_size)
        for part in torch.split(starts.flatten(0, 1), BATCH)
    ]
    images = torch.cat(parts).reshape(starts.shape)
    blends = straight(images)
    return Paths(
        run=run,
        rho=rho,
        starts=starts,
        images=images,
        blends=blends,
        held_out=measure(run, some_of(run, run.data.test_x, generator)),
        on_path=measure(run, images.flatten(0, 1)),
        on_blend=measure(run, blends.flatten(0, 1)),
    )


def _lengths(points: Tensor) -> Tensor:
    return points.diff(dim=1).square().mean(dim=-1).sqrt()
