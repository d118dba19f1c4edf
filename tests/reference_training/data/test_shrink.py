"""Averaging images down, against exact fractions and PyTorch's own area average."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.data import shrink as shrink_module
from ebmguard.reference_training.data.shrink import shrunk


def random_images(*shape: int, most: int = 255) -> np.ndarray:
    return np.random.default_rng(0).integers(most + 1, size=shape, dtype=np.uint8)


def slowly(images: np.ndarray, size: int) -> np.ndarray:
    """The mean of each square as a fraction, a half rounded up."""
    count, channels, height, _ = images.shape
    side = height // size
    small = np.zeros((count, channels, size, size), dtype=np.uint8)
    for n, c, row, column in np.ndindex(small.shape):
        square = images[n, c, row * side : (row + 1) * side, column * side : (column + 1) * side]
        mean = Fraction(sum(map(int, square.ravel())), side * side)
        small[n, c, row, column] = math.floor(mean + Fraction(1, 2))
    return small


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_each_pixel_is_the_rounded_mean_of_its_square(size):
    images = random_images(5, 3, 12, 12)
    small = shrunk(images, size)
    assert small.dtype == np.uint8
    assert small.flags.c_contiguous
    np.testing.assert_array_equal(small, slowly(images, size))


def test_a_half_is_rounded_up_and_the_levels_stay():
    assert shrunk(random_images(0, 3, 8, 8), 4).shape == (0, 3, 4, 4)
    image = np.array([[0, 0, 1, 1], [0, 2, 0, 0], [255, 255, 16, 16], [255, 254, 16, 16]])
    small = shrunk(image[None, None].astype(np.uint8), 2)
    np.testing.assert_array_equal(small[0, 0], [[1, 1], [255, 16]])


def test_parts_of_many_images_join_as_they_were(monkeypatch):
    images = random_images(23, 1, 4, 4)
    expected = slowly(images, 2)
    for at_once in (1, 7, 23, 100):
        monkeypatch.setattr(shrink_module, "AT_ONCE", at_once)
        np.testing.assert_array_equal(shrunk(images, 2), expected)


@pytest.mark.parametrize("size", [-2, 0, 3, 8, 16, 56])
def test_a_size_that_is_no_divisor_is_refused_with_those_that_are(size):
    with pytest.raises(ConfigError) as caught:
        shrunk(random_images(1, 1, 28, 28), size)
    message = str(caught.value)
    assert f"image_size is {size}, and the images have 28x28 pixels" in message
    assert message.endswith("expected one of 1, 2, 4, 7, 14, 28")


def test_every_part_of_a_data_set_is_averaged_down_and_nothing_else_changes():
    counts = {"train_images": 90, "valid_images": 20, "test_images": 40}
    whole = load_data("digits", **counts)
    small = load_data("digits", **counts, image_size=4)
    assert small.sample_shape == (1, 4, 4)
    for name in ("train", "valid", "test"):
        x, y = getattr(whole, f"{name}_x"), getattr(whole, f"{name}_y")
        means = F.avg_pool2d(x.double(), 2)
        expected = (means + 0.5).floor().to(torch.uint8)
        assert torch.equal(getattr(small, f"{name}_x"), expected)
        assert torch.equal(getattr(small, f"{name}_y"), y)
    assert (small.levels, small.classes, small.pad) == (16, 10, 0)
    with pytest.raises(ConfigError, match=r"expected one of 1, 2, 4, 8$"):
        load_data("digits", image_size=5)
