"""How a classifier holds against changes of its images that are made to mislead it.

Projected gradient descent in balls of L_inf and L_2 around test images, through a classifier that
first lets chains of the model refine what it sees, as in JEM (Grathwohl et al. 2020, Section 5.4):
JEM-0, JEM-1 and JEM-10 by the number of steps. The published code calls foolbox, whose attack looks
for the smallest radius; here a radius is given, and each step is 2.5 of its 40ths, which cross the
ball (Madry et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ebmguard.samplers import sgld

from ..data import ImageData
from ..networks import WideResNet, evaluation_mode

STEPS, RESTARTS, CHAINS = 40, 20, 5
"""Published: steps of an attack, its random starts, and chains whose logits are averaged."""
BATCH = 50
SEED = 0
"""The same starts and chains in every evaluation."""

Logits = Callable[[Tensor], Tensor]


def refined_logits(
    network: WideResNet, x: Tensor, steps: int, rng: Generator, **sizes: Any
) -> Tensor:
    """Class logits after a few Langevin steps from each image, which gradients do not see.

    Args:
        network: whose f(x) the chains climb.
        x: (B, C, H, W).
        steps: of each of several chains, over whose ends the logits are averaged; 0: no chain.
        rng: of their noise.
        sizes: step_size and noise_std.
    """
    if not steps:
        return network.classify(x)
    starts = x.repeat_interleave(CHAINS, dim=0)
    ends = sgld(network, starts.detach(), steps=steps, generator=rng, **sizes)
    logits = network.classify(starts + (ends - starts).detach())
    return logits.view(len(x), CHAINS, -1).mean(dim=1)


def holds(logits: Logits, x: Tensor, y: Tensor, norm: str, radius: float, rng: Generator) -> Tensor:
    """Whether each image is given its label, and all that an attack finds in a ball around it.

    Args:
        logits: (B, C, H, W) -> (B, classes), differentiable.
        x: (B, C, H, W) in [-1, 1], which attacks do not leave.
        y: (B,) labels.
        norm: of the ball, "linf" or "l2".
        radius: of the ball, in units of x.
        rng: of the starts, on the device of x.
    """
    with torch.no_grad():
        held = logits(x).argmax(dim=1) == y
    for _ in range(RESTARTS if radius else 0):
        left = held.nonzero()[:, 0]
        if not len(left):
            break
        centre, labels = x[left], y[left]
        fooled = torch.zeros_like(labels, dtype=torch.bool)
        at = _start(centre, norm, radius, rng)
        for step in range(STEPS + 1):
            at.requires_grad_()
            found = logits(at)
            fooled |= found.argmax(dim=1) != labels
            if step < STEPS:
                (slope,) = torch.autograd.grad(F.cross_entropy(found, labels, reduction="sum"), at)
                ahead = slope.sign() if norm == "linf" else _unit(slope)
                at = _inside(at.detach() + 2.5 * radius / STEPS * ahead, centre, norm, radius)
        held[left] = ~fooled
    return held


def _start(centre: Tensor, norm: str, radius: float, rng: Generator) -> Tensor:
    """Uniform in the ball, and cut to the images' cube."""
    if norm == "linf":
        away = torch.empty_like(centre).uniform_(-1, 1, generator=rng)
    else:
        away = _unit(torch.empty_like(centre).normal_(generator=rng))
        size = torch.empty_like(centre[:, :1, :1, :1]).uniform_(generator=rng)
        away = away * size.pow(1 / centre[0].numel())
    return _inside(centre + radius * away, centre, norm, radius)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.flatten(1), eps=torch.finfo(x.dtype).tiny).view_as(x)


def _inside(x: Tensor, centre: Tensor, norm: str, radius: float) -> Tensor:
    away = x - centre
    away = away.clamp(-radius, radius) if norm == "linf" else away.renorm(2, 0, radius)
    return (centre + away).clamp(-1, 1)


def robustness(
    network: WideResNet,
    data: ImageData,
    attacks: Sequence[tuple[str, float]],
    *,
    images: int,
    steps: int,
    noise: float,
    **sizes: float,
) -> list[dict[str, Any]]:
    """Accuracy on the first test images without attack, and under each.

    Args:
        network: as `steps` and `sizes` in :func:`refined_logits`.
        data: on its device.
        attacks: norms, and radii in 255ths of the range of a pixel.
        images: at most so many.
        noise: standard deviation of what images get before they are refined.

    Returns:
        for each its `norm` ("none" first), `radius`, the number of `images` and the `accuracy`.
    """
    x, y = data.scale(data.test_x[:images]), data.test_y[:images]
    rows: list[dict[str, Any]] = []
    with evaluation_mode(network):
        for norm, radius in (("none", 0.0), *attacks):
            rng = Generator(x.device).manual_seed(SEED)

            def logits(x: Tensor, rng: Generator = rng) -> Tensor:
                if noise:
                    x = x + noise * torch.randn(x.shape, generator=rng, device=x.device)
                return refined_logits(network, x, steps, rng, **sizes)

            parts = zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True)
            # Images reach from -1 to 1.
            held = torch.cat([holds(logits, *part, norm, 2 * radius / 255, rng) for part in parts])
            found = {"norm": norm, "radius": radius, "images": len(x)}
            rows.append({**found, "accuracy": float(held.double().mean())})
    return rows
