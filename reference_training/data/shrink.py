"""Images averaged down to a smaller size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ebmguard.errors import ConfigError

AT_ONCE = 1024
"""Images whose sums are held in memory at a time: those take eight bytes a pixel, images one."""


def shrunk(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Each pixel is the mean of a square of pixels, rounded to the nearest integer.

    A half is rounded up. The levels of grey are those of the images: nothing is stretched.

    Args:
        images: (N, C, H, H); N may be 0.
        size: their new height and width, a divisor of H.

    Returns:
        (N, C, size, size); `images` itself where they have that size.

    Raises:
        ConfigError: the squares would not be whole, or there would be more pixels than before.
    """
    count, channels, height, _ = images.shape
    if size < 1 or height % size:
        sizes = [divisor for divisor in range(1, height + 1) if height % divisor == 0]
        raise ConfigError(
            f"image_size is {size}, and the images have {height}x{height} pixels, whose means are "
            f"taken over whole squares: expected one of {', '.join(map(str, sizes))}"
        )
    if size == height:
        return images
    side = height // size
    area = side * side
    small = np.empty((count, channels, size, size), dtype=np.uint8)
    for start in range(0, count, AT_ONCE):
        part = images[start : start + AT_ONCE]
        squares = part.reshape(len(part), channels, size, side, size, side)
        sums = squares.sum(axis=(3, 5), dtype=np.int64)
        small[start : start + AT_ONCE] = (2 * sums + area) // (2 * area)
    return small
