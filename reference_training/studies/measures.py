"""Images in numbers: saturation, the nearest data, and how far samples of numbers lie apart."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebmguard.errors import ConfigError

from ..judge.ood import values_and_slopes
from ..shortrun.trained import TrainedRun

Floats = NDArray[np.float64]

BATCH = 256
"""Images that pass the network together."""
ROWS = 4096
"""Images of a data set that are compared at once."""


def measure(run: TrainedRun, x: Tensor) -> pd.DataFrame:
    """Images, (N, C, H, W), by a run's network and its training images: a row for each.

    Its columns are those of :func:`saturation`; "f"; "slope", the length of its gradient; and
    "distance", the root mean square difference to the nearest training image, in units of a pixel
    in [-1, 1].
    """
    own = dict(zip(("f", "slope"), values_and_slopes(run.network, x, BATCH), strict=True))
    own["distance"], _ = nearest(x, run.data.train_x, run.data.levels)
    numbers = {name: values.cpu().double().numpy() for name, values in own.items()}
    return saturation(x, run.data.levels).assign(**numbers)


def saturation(x: Tensor, levels: int) -> pd.DataFrame:
    """How saturated each image is, (N, C, H, W) not cut to [-1, 1]; NaN where it is not finite.

    Returns:
        the columns "excess": mean of max(|x| - 1, 0), as no datum is beyond 1; "ends": share of the
        entries that are shown as pure black or white, with |x| within half a level of 1, or larger;
        "contrast": standard deviation of the entries.
    """
    images = x.detach().cpu().double().flatten(1)
    size = images.abs()
    found = {
        "excess": (size - 1).clamp(min=0).mean(dim=1),
        "ends": (size >= 1 - 1 / levels).double().mean(dim=1),
        "contrast": images.std(dim=1, correction=0),
    }
    frame = pd.DataFrame({name: values.numpy() for name, values in found.items()})
    return frame[size.isfinite().all(dim=1).numpy()].reindex(frame.index)


def means(measured: pd.DataFrame) -> dict[str, float]:
    """The mean of every column; NaN where a value is."""
    return dict(measured.mean(skipna=False))


def nearest(x: Tensor, data: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The nearest image of a data set to each image, in Euclidean distance.

    Args:
        x: (N, C, H, W), cut to the cube [-1, 1] before it is compared, as a picture shows it.
        data: (M, C, H, W) uint8 in 0..levels, which stand for [-1, 1], on the device of `x`.
        levels: of the data.

    Returns:
        (N,) root mean square of the difference, NaN for an image that is not finite; and (N,) which
        one it is.
    """
    _check_data(x, data, "cannot be compared with")
    rows = x.detach().clamp(-1, 1).flatten(1)
    found = []
    for part in torch.split(data, ROWS):
        images = _scaled(part, levels, rows.dtype)
        # |x - y|^2 without |x|^2, which is the same for every y: one product of matrices.
        found.append((images.square().sum(dim=1) - 2 * rows @ images.T).min(dim=1))
    values, places = (torch.stack(each) for each in zip(*found, strict=True))
    chunk = values.argmin(0, keepdim=True)
    index = (places.gather(0, chunk) + ROWS * chunk)[0]
    # The product decides which one is nearest, and cancels too much to say how near it is.
    difference = rows - _scaled(data[index], levels, rows.dtype)
    finite = x.detach().flatten(1).isfinite().all(dim=1)
    return torch.where(finite, difference.square().mean(dim=1).sqrt(), torch.nan), index


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|X − Y| − E|X − X'| − E|Y − Y'|, with |·| the root mean square over pixels.

    Zero in expectation where both are of one distribution, else positive (Székely & Rizzo 2013);
    without bias, so that it may come out a little below zero; NaN of fewer than 2 images. It sees
    noise and a wrong brightness, and says little of what is depicted.
    """
    if min(len(x), len(y)) < 2:
        return math.nan
    x, y = x.flatten(1), y.flatten(1)
    # Without the shortcut by products of matrices, which loses digits of small distances.
    far = partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
    between = far(x, y).mean()
    within = [far(z, z).sum() / (len(z) * (len(z) - 1)) for z in (x, y)]
    return float((2 * between - within[0] - within[1]) / math.sqrt(x.shape[1]))


def _scaled(images: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    return images.flatten(1).to(dtype).div(levels / 2).sub(1.0)


def _check_data(x: Tensor, data: Tensor, words: str) -> None:
    if not len(data) or data.shape[1:] != x.shape[1:]:
        raise ConfigError(
            f"images of {tuple(x.shape[1:])} {words} data of {tuple(data.shape)}: expected one "
            "image or more, of that shape"
        )
