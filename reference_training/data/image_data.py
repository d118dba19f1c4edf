"""A labelled image data set: as a reader returns it, and with a fixed split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Pixels(Protocol):
    """Images as an array has them, or a reader that decodes those that are asked for."""

    def __len__(self) -> int:
        """Number of images."""

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """The images of some rows, (N,) -> (N, C, H, W)."""


Images = Mapping[str, tuple[Pixels, NDArray[np.int64]]]
"""The parts "train", "test" and, where one is published, "valid" of a data set, in their published
order: images (N, C, H, W) uint8, and their labels (N,) from 0."""


@dataclass(frozen=True)
class ImageData:
    """Images as bytes, their labels, and how they are augmented.

    Attributes:
        name: as `--data` takes it.
        train_x: (N, C, H, W) uint8 in 0..levels.
        train_y: (N,) int64 in 0..classes - 1.
        valid_x: (V, C, H, W) uint8; V may be 0.
        valid_y: (V,) int64.
        test_x: (T, C, H, W) uint8.
        test_y: (T,) int64.
        classes: number of labels.
        levels: the largest value that a pixel may have, shown as full brightness.
        pad: pixels of reflection around an image before it is cropped at random.
        flip: images are mirrored left to right at random.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    valid_x: Tensor
    valid_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    levels: int
    pad: int
    flip: bool

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Shape of one image, (C, H, W)."""
        _, channels, height, width = self.train_x.shape
        return channels, height, width

    def to(self, device: torch.device) -> ImageData:
        """The same data on `device`."""
        tensors: dict[str, Any] = {n: x for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device) for name, x in tensors.items()})

    def scale(self, x: Tensor) -> Tensor:
        """Bytes of any shape as float32 in [-1, 1]."""
        return x.to(torch.float32).div(self.levels / 2).sub(1.0)
