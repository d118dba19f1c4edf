"""Samples as pictures: grids, PNG files and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..engine.run_folder import open_file

if TYPE_CHECKING:
    import numpy.typing as npt


def sample_grid(samples: Tensor, *, columns: int = 8, zoom: int = 8) -> npt.NDArray[Any]:
    """Images side by side on white, as a float64 array (height, width, 3) in [0, 1].

    Args:
        samples: ``(N, 1 or 3, H, W)`` in [-1, 1]. Values outside are clipped; pixels that are not
            finite are red, not hidden.
        columns: images in a row.
        zoom: pixels of the picture for each pixel of a sample.
    """
    if samples.ndim != 4 or samples.shape[1] not in (1, 3):
        raise ValueError(
            f"samples have shape {tuple(samples.shape)}, expected (N, 1 or 3, H, W) images"
        )
    images = samples.detach().cpu().double().expand(-1, 3, -1, -1)
    red = images.new_tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)
    finite = torch.isfinite(images).all(dim=1, keepdim=True)
    pixels = torch.where(finite, (images.clamp(-1, 1) + 1) / 2, red)
    pixels = pixels.repeat_interleave(zoom, dim=2).repeat_interleave(zoom, dim=3)
    pixels = torch.nn.functional.pad(pixels, (1, 1, 1, 1), value=1.0)
    blank = pixels.new_ones(-len(pixels) % columns, *pixels.shape[1:])
    rows = torch.cat([pixels, blank]).reshape(-1, columns, *pixels.shape[1:])
    rows = rows.permute(0, 3, 1, 4, 2)
    picture: npt.NDArray[Any] = rows.flatten(2, 3).flatten(0, 1).numpy()
    return picture


def save_sample_figures(folder: Path, samples: dict[str, Tensor]) -> None:
    """Write one PNG for each named set of samples, and samples.npz with all of them."""
    from matplotlib.image import imsave

    for name, batch in samples.items():
        imsave(folder / f"samples_{name}.png", sample_grid(batch))
    arrays: dict[str, Any] = {name: x.detach().cpu().numpy() for name, x in samples.items()}
    np.savez_compressed(folder / "samples.npz", **arrays)


def as_bytes(x: Tensor) -> Tensor:
    """Samples as pictures show them: clamped to [-1, 1], as 0..255; NaN is black."""
    return x.nan_to_num(-1.0).clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)


def load_samples(file: Path) -> Tensor:
    """Samples that were kept as :func:`as_bytes` in a .npy file, float32 in [-1, 1]."""
    with open_file(file) as stream:
        pixels = np.load(stream, allow_pickle=False)
    return torch.from_numpy(pixels).float().div(127.5).sub(1)
