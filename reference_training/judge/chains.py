"""Fresh samples of a trained model: Langevin chains from uniform noise, a batch at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ebmguard.samplers import random_steps

BATCH = 250
SEED = 0
"""The same noise in every evaluation, so that two differ by their models alone."""
SAID_EVERY = 1000
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
        device: where the chains are.

    Returns:
        (N, C, H, W), as the chains left them, on the CPU. They depend on the model and the device
        alone.
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
