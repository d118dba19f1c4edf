"""How saturated images are: numbers of each image, to be held against those of data."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Saturation(NamedTuple):
    """Numbers of each image, (N,), float64. Images of data lie in the cube [-1, 1].

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
    """The numbers of each image; NaN, but for shares, where its entries are not finite.

    Args:
        x: (N, C, H, W), not cut to the cube.
        levels: the largest value of the data as integers: their levels are 2 / levels apart.
    """
    images = x.detach().double()
    entries = images.flatten(1)
    size = entries.abs()
    return Saturation(
        beyond=(size > 1).double().mean(dim=1),
        excess=(size - 1).clamp(min=0).mean(dim=1),
        ends=(size >= 1 - 1 / levels).double().mean(dim=1),
        size=size.mean(dim=1),
        contrast=entries.std(dim=1, correction=0),
        colour=(images.amax(dim=1) - images.amin(dim=1)).flatten(1).mean(dim=1),
    )
