"""Grids of samples as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
