"""How saturated images are: numbers of each image, to be held against those of data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Saturation(NamedTuple):
    """Numbers of each image, (N,), float64, on the CPU; NaN where it is not finite.

    Attributes:
        beyond: share of the entries with |x| > 1, where no datum is.
        excess: mean over the entries of max(|x| - 1, 0): how far beyond.
        ends: share of the entries that are shown as pure black or white: |x| is within half a
            level of the data of 1, or larger. Data have such entries too.
        size: mean of |x|.
        contrast: standard deviation of the entries.
        colour: mean over the pixels of the largest minus the smallest channel; 0 for grey images.
    """

    beyond: Tensor
    excess: Tensor
    ends: Tensor
    size: Tensor
    contrast: Tensor
    colour: Tensor


def saturation(x: Tensor, levels: int) -> Saturation:
    """The numbers of each image.

    Args:
        x: (N, C, H, W), not cut to the cube [-1, 1], in which images of data lie.
        levels: the largest value of the data as integers: their levels are 2 / levels apart.
    """
    images = x.detach().cpu().double()
    finite = images.isfinite().flatten(1).all(dim=1)
    # A comparison with NaN is false: it would count as an entry inside the cube.
    images = torch.where(finite[:, None, None, None], images, torch.nan)
    entries = images.flatten(1)
    size = entries.abs()
    return Saturation(
        beyond=torch.where(finite, (size > 1).double().mean(dim=1), torch.nan),
        excess=(size - 1).clamp(min=0).mean(dim=1),
        ends=torch.where(finite, (size >= 1 - 1 / levels).double().mean(dim=1), torch.nan),
        size=size.mean(dim=1),
        contrast=entries.std(dim=1, correction=0),
        colour=(images.amax(dim=1) - images.amin(dim=1)).flatten(1).mean(dim=1),
    )
