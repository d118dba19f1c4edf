"""What a reader of a data set returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Pixels(Protocol):
    """Images as an array has them, or a reader that decodes those that are asked for."""

    def __len__(self) -> int:
        """Number of images."""

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """The images of some rows, (N,) -> (N, C, H, W)."""


@dataclass(frozen=True)
class Images:
    """The published images, in their published order.

    Attributes:
        train_x: (N, C, H, W) uint8.
        train_y: (N,) int64, from 0.
        test_x: (T, C, H, W) uint8.
        test_y: (T,) int64, from 0.
        valid: images (V, C, H, W) uint8 and labels (V,) of a validation set, where one is
            published; else it is taken from the training images.
    """

    train_x: Pixels
    train_y: NDArray[np.int64]
    test_x: Pixels
    test_y: NDArray[np.int64]
    valid: tuple[Pixels, NDArray[np.int64]] | None = None
