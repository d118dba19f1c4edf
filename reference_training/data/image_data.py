"""A labelled image data set with a fixed split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


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
        return replace(
            self,
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            valid_x=self.valid_x.to(device),
            valid_y=self.valid_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
        )

    def scale(self, x: Tensor) -> Tensor:
        """Bytes of any shape as float32 in [-1, 1]."""
        return x.to(torch.float32).div(self.levels / 2).sub(1.0)
