"""How far images are from a data set: a measure of samples that does not ask the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

ROWS = 4096
"""Images of the data set that are compared at once."""


class Nearest(NamedTuple):
    """Of each image, the nearest one of a data set.

    Attributes:
        distance: (N,) root mean square over the entries of the difference, in units of a pixel in
            [-1, 1]; NaN for an image that is not finite.
        place: (N,) int64, which one it is.
    """

    distance: Tensor
    place: Tensor


def nearest(x: Tensor, data: Tensor, levels: int) -> Nearest:
    """The nearest image of a data set to each image, in Euclidean distance.

    Args:
        x: (N, C, H, W), cut to the cube [-1, 1] before it is compared, as a picture shows it.
        data: (M, C, H, W) uint8 in 0..levels, on the device of `x`.
        levels: of the data, which stand for [-1, 1].

    Raises:
        ConfigError: the data are empty, or of another shape.
    """
    if not len(data) or data.shape[1:] != x.shape[1:]:
        raise ConfigError(
            f"images of {tuple(x.shape[1:])} cannot be compared with data of {tuple(data.shape)}: "
            "expected one image or more, of that shape"
        )
    rows = x.detach().clamp(-1, 1).flatten(1)
    least = torch.full((len(rows),), torch.inf, dtype=rows.dtype, device=rows.device)
    index = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for start in range(0, len(data), ROWS):
        images = _scaled(data[start : start + ROWS], levels, rows)
        # |x - y|^2 without |x|^2, which is the same for every y: one product of matrices.
        squares = images.square().sum(dim=1) - 2 * rows @ images.T
        value, place = squares.min(dim=1)
        closer = value < least
        least = torch.where(closer, value, least)
        index = torch.where(closer, place + start, index)
    # The product decides which one is nearest, and cancels too much to say how near it is.
    difference = rows - _scaled(data[index], levels, rows)
    distance = difference.square().mean(dim=1).sqrt()
    finite = x.detach().flatten(1).isfinite().all(dim=1)
    return Nearest(torch.where(finite, distance, torch.nan), index)


def _scaled(images: Tensor, levels: int, like: Tensor) -> Tensor:
    return images.flatten(1).to(like.dtype).div(levels / 2).sub(1.0)
