"""Rows of a replay buffer that would poison the run again."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["poisoned_rows", "purge"]

# As far out as no chain of a healthy buffer.
_FAR = 10.0
_MAD_TO_SIGMA = 1.4826
# Fresh rows and chains at a clamp all have about the same largest entry, and a MAD near 0; chains
# that have moved lie a few times farther out.
_FLOOR = 0.3


def poisoned_rows(samples: Tensor) -> Tensor:
    """Which rows are not finite, or whose largest entry lies far outside that of the others.

    Far is 10 robust standard deviations (1.4826 MAD, at least 0.3 of the median) above the
    median of the rows' largest absolute entries.

    Args:
        samples: the buffer, ``(rows, ...)``.

    Returns:
        bool tensor ``(rows,)``.
    """
    largest = samples.reshape(len(samples), -1).abs().amax(-1).double()
    finite = torch.isfinite(largest)
    if not bool(finite.any()):
        return ~finite
    known = largest[finite]
    centre = known.median()
    scale = torch.maximum(_MAD_TO_SIGMA * (known - centre).abs().median(), _FLOOR * centre)
    return ~finite | (largest > centre + _FAR * scale)


def purge(samples: Tensor, generator: torch.Generator, classes: int = 1) -> int:
    """Overwrite the poisoned rows with copies of healthy ones of their class, drawn at random.

    Args:
        samples: the buffer, ``(rows, ...)``, changed in place.
        generator: of the draws, on the CPU.
        classes: number of equal blocks of rows that stay among themselves.

    Returns:
        how many rows were replaced; those of a class without a healthy row remain as they are.
    """
    poisoned = poisoned_rows(samples)
    count = 0
    for own, bad in zip(samples.chunk(classes), poisoned.chunk(classes), strict=True):
        healthy = (~bad).nonzero().squeeze(1)
        replaced = int(bad.sum())
        if replaced and len(healthy):
            chosen = torch.randint(len(healthy), (replaced,), generator=generator)
            own[bad] = own[healthy[chosen.to(own.device)]]
            count += replaced
    return count
