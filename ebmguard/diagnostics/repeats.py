"""Whether a sampler returns the samples of its previous call: a chain that hangs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..energies import of_tensors

__all__ = ["fingerprint", "repeated"]


@of_tensors
def fingerprint(samples: Tensor) -> Tensor:
    """Sum and extremes of samples ``(..., B, d)``, which identify them: ``(..., B, 3)``."""
    return torch.stack((samples.sum(-1), samples.amin(-1), samples.amax(-1)), -1)


@of_tensors
def repeated(now: Tensor, before: Tensor) -> Tensor:
    """Share of the samples that equal those at the same place of the sampler's previous call.

    A chain that moves or restarts never repeats itself to the last bit. Both arguments are a
    :func:`fingerprint`, ``(..., B, 3)``.

    Returns:
        float32 tensor, ``(...,)``; NaN if the shapes differ. A sample with a NaN never counts as
        repeated.
    """
    if now.shape != before.shape:
        return torch.full(now.shape[:-2], torch.nan, device=now.device)
    return (now == before).all(-1).mean(-1, dtype=torch.float32)
