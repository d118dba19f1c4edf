"""What a reader of a data set returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Images:
    """The published training and test images, in their published order.

    Attributes:
        train_x: (N, C, H, W) uint8.
        train_y: (N,) int64, from 0.
        test_x: (T, C, H, W) uint8.
        test_y: (T,) int64, from 0.
    """

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
