"""Grids of samples as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

NON_FINITE = (1.0, 0.0, 0.0)
"""Red: pixels that are NaN or infinite are shown, not hidden."""


def sample_grid(samples: Tensor, *, columns: int = 8, zoom: int = 8) -> npt.NDArray[np.float64]:
    """Samples side by side: (N, 1 or 3, H, W) in [-1, 1] -> an RGB picture in [0, 1].

    Values outside of [-1, 1] are clipped; pixels that are not finite are red.

    Raises:
        ValueError: the samples are not images of one or three channels.
    """
    if samples.ndim != 4 or samples.shape[1] not in (1, 3):
        raise ValueError(
            f"samples have shape {tuple(samples.shape)}, expected (N, 1 or 3, H, W) images"
        )
    images = samples.detach().to("cpu").double().numpy()
    images = np.broadcast_to(images, (images.shape[0], 3, *images.shape[2:]))
    finite = np.isfinite(images).all(axis=1, keepdims=True)
    red = np.array(NON_FINITE).reshape(1, 3, 1, 1)
    pixels = np.where(finite, np.clip((np.where(finite, images, 0.0) + 1) / 2, 0, 1), red)
    count, _, height, width = pixels.shape
    rows = -(-count // columns)
    cell = (height * zoom + 2, width * zoom + 2)
    grid = np.ones((rows * cell[0], columns * cell[1], 3))
    for index in range(count):
        top, left = (index // columns) * cell[0] + 1, (index % columns) * cell[1] + 1
        tile = pixels[index].transpose(1, 2, 0).repeat(zoom, axis=0).repeat(zoom, axis=1)
        grid[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    return grid


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
