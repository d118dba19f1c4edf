"""Random crops and flips of a batch of images, on their device."""

from __future__ import annotations

import torch
from torch import Tensor


def augment(x: Tensor, *, pad: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Each image padded by its reflection, cropped at random and mirrored half of the time.

    The augmentation of JEM (Grathwohl et al. 2020), with offsets of its own for each image. Nothing
    is drawn for what is switched off, and nothing waits for the device.

    Args:
        x: (B, C, H, W), of any dtype.
        pad: pixels added on each side, less than H and W; 0 for no crops.
        flip: mirror left to right with probability 1/2.
        generator: on the device of `x`.

    Returns:
        (B, C, H, W), of the dtype of `x`; `x` itself where there is nothing to do.
    """
    if not pad and not flip:
        return x
    count, device = len(x), x.device
    top = left = torch.zeros(count, dtype=torch.int64, device=device)
    mirrored = torch.zeros(count, dtype=torch.bool, device=device)
    if pad:
        top, left = torch.randint(2 * pad + 1, (2, count), generator=generator, device=device)
    if flip:
        mirrored = torch.randint(2, (count,), generator=generator, device=device) == 1
    return crop(x, top - pad, left - pad, mirrored)


def crop(x: Tensor, top: Tensor, left: Tensor, mirrored: Tensor) -> Tensor:
    """A window of each image as large as the image, which is reflected at its borders.

    Args:
        x: (B, C, H, W).
        top: (B,) int64, first row of the window, between -H and H, both excluded.
        left: (B,) int64, its first column, between -W and W, both excluded.
        mirrored: (B,) bool, the window is mirrored left to right.

    Returns:
        (B, C, H, W).
    """
    count, channels, height, width = x.shape
    image = torch.arange(count, device=x.device)
    channel = torch.arange(channels, device=x.device)
    row = torch.arange(height, device=x.device)
    column = torch.arange(width, device=x.device)
    columns = torch.where(mirrored[:, None], width - 1 - column, column)
    rows = _reflect(top[:, None] + row, height)
    columns = _reflect(left[:, None] + columns, width)
    return x[
        image[:, None, None, None],
        channel[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def _reflect(index: Tensor, size: int) -> Tensor:
    """Indices from outside 0..size - 1, mirrored at the border pixel, which is not repeated."""
    last = size - 1
    return last - (last - index.abs()).abs()
