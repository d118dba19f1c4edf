"""Rows of a replay buffer that would poison the run again."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["poisoned_rows", "purge"]

# As far out as no chain of a healthy buffer: its largest entries differ by factors, not tens.
_FAR = 10.0
_MAD_TO_SIGMA = 1.4826
# Chains that end at a clamp all have the same largest entry, and a MAD of 0.
_FLOOR = 0.1


def poisoned_rows(samples: Tensor) -> Tensor:
    """Which rows are not finite, or whose largest entry lies far outside that of the others.

    Far is 10 robust standard deviations (1.4826 MAD, at least a tenth of the median) above the
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


def purge(samples: Tensor, generator: torch.Generator) -> int:
    """Overwrite the poisoned rows with copies of healthy ones, drawn at random.

    Args:
        samples: the buffer, ``(rows, ...)``, changed in place.
        generator: of the draws, on the CPU.

    Returns:
        how many rows were replaced; all remain as they are where none is healthy.
    """
    poisoned = poisoned_rows(samples)
    count = int(poisoned.sum())
    if not count or count == len(samples):
        return 0
    healthy = (~poisoned).nonzero().squeeze(1)
    chosen = torch.randint(len(healthy), (count,), generator=generator).to(samples.device)
    samples[poisoned] = samples[healthy[chosen]]
    return count
