"""Fresh samples of a trained model: Langevin chains from noise, and annealed ones."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ebmguard.samplers import annealed, random_steps, sgld

from ..bism.deep_train import STD
from ..bism.matching import score

BATCH = 250
SEED = 0
"""The same noise in every evaluation, so that two differ by their models alone."""
SAID_EVERY = 1000
HOTTEST = 100.0
_logger = logging.getLogger("ebmguard.evaluate")


def fresh_chains(
    walk: Callable[[Tensor, int, torch.Generator], Tensor],
    shape: tuple[int, int, int, int],
    steps: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Ends of chains that start from U(-1, 1).

    Args:
        walk: so many steps of a batch of chains, whose noise is the generator's.
        shape: (N, C, H, W).
        steps: the least and the most of a chain; each batch draws its number.
        device: of the chains; their ends are on the CPU, and depend on it and the model alone.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    lengths = torch.Generator().manual_seed(SEED)
    count, *image = shape
    parts = []
    for start in range(0, count, BATCH):
        size, number = min(BATCH, count - start), random_steps(*steps, lengths)
        x0 = 2 * torch.rand((size, *image), generator=generator, device=device) - 1
        parts.append(walk(x0, number, generator).cpu())
        done = start + size
        if done % SAID_EVERY == 0 or done == count:
            _logger.info("%d of %d fresh chains, %d steps each", done, count, number)
    return torch.cat(parts)


def temperatures(steps: int, hottest: float = HOTTEST) -> list[float]:
    """The published course over any number of steps: 100, then down to 1, then straight to 0.

    Published are 500, 2,000 and 200 steps.
    """
    hot, last = steps * 5 // 27, steps * 2 // 27
    down = annealed(hottest, 1.0, steps - hot - last)
    return [hottest] * hot + down + annealed(1.0, 0.0, last, shape="linear")


def anneal(
    log_density: Callable[[Tensor], Tensor],
    x: Tensor,
    steps: int,
    held: float,
    rng: Generator,
    hottest: float = HOTTEST,
) -> Tensor:
    """Ends of annealed chains, and a last step that takes the noise ``held`` off.

    Args:
        log_density: of x, but for its constant, ``(B, ...)`` to ``(B,)``; it may draw latents.
        x: where they start.
        steps: how many.
        held: noise at which the model is the density, taken off by Tweedie's formula; 0: none.
        rng: of the chains' noise, on the device of x.
        hottest: the temperature at the start; 1 anneals nothing but the end.
    """
    noise = [STD * hot**0.5 for hot in temperatures(steps, hottest)]
    ends = sgld(log_density, x, steps=steps, step_size=STD**2 / 2, noise_std=noise, generator=rng)
    if not held:
        return ends
    return (ends + held**2 * score(log_density, ends)).detach()
