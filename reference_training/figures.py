"""Samples as bytes, and grids of them as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebmguard.report import sample_grid


def save_sample_figures(folder: Path, samples: dict[str, Tensor]) -> None:
    """Write one PNG for each named set of samples, and samples.npz with all of them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.image import imsave
    except ImportError as error:
        raise ImportError(
            'the sample grids need matplotlib: pip install "ebmguard[train]"'
        ) from error
    for name, batch in samples.items():
        imsave(folder / f"samples_{name}.png", sample_grid(batch))
    arrays: dict[str, Any] = {
        name: batch.detach().to("cpu").numpy() for name, batch in samples.items()
    }
    np.savez_compressed(folder / "samples.npz", **arrays)


def as_bytes(x: Tensor) -> Tensor:
    """Samples as pictures show them: clamped to [-1, 1], as 0..255; NaN is black."""
    black = torch.full_like(x, -1.0)
    pixels = torch.where(x.isnan(), black, x).clamp(-1, 1).add(1).mul(127.5)
    return pixels.round().to(torch.uint8)
