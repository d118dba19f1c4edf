"""Data sets by name: their split, their sizes, where they are looked for; images made smaller."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load, load_data
from ebmguard.reference_training.data.load import shrunk
from ebmguard.reference_training.data.published import read_digits


@pytest.fixture
def sixty(tmp_path, monkeypatch):
    """A set of 60 training images that lies in files, each all of one value: its place."""
    images = np.arange(80, dtype=np.uint8)[:, None, None, None].repeat(4, 2).repeat(4, 3)
    labels = np.arange(80, dtype=np.int64) % 10
    parts = {"train": (images[:60], labels[:60]), "test": (images[60:], labels[60:])}
    monkeypatch.setitem(load._SETS, "mnist", load._DataSet(lambda root: parts))
    return partial(load_data, "mnist", tmp_path)


def places(x):
    return x[:, 0, 0, 0].tolist()


def test_split_is_that_of_jem(sixty):
    state = np.random.get_state()
    np.random.seed(1234)
    order = list(range(60))
    np.random.shuffle(order)
    np.random.set_state(state)
    data = sixty(valid_images=15)
    assert places(data.valid_x) == order[:15]
    assert places(data.train_x) == order[15:]
    assert places(data.test_x) == [*range(60, 80)]
    for x, y in ((data.train_x, data.train_y), (data.valid_x, data.valid_y)):
        assert [place % 10 for place in places(x)] == y.tolist()
    few = sixty(valid_images=15, train_images=10, test_images=4)
    assert places(few.valid_x) == order[:15]
    assert places(few.train_x) == order[15:25]
    assert places(few.test_x) == [*range(60, 64)]
    with pytest.raises(ConfigError, match="valid_images is 5000, expected at most 59"):
        sixty()


def test_scale_maps_bytes_to_minus_one_and_one(sixty):
    scaled = sixty(valid_images=0).scale(torch.arange(256, dtype=torch.uint8))
    expected = torch.linspace(-1, 1, 256, dtype=torch.float64)
    assert scaled.dtype == torch.float32
    assert (scaled[0], scaled[-1]) == (-1, 1)
    torch.testing.assert_close(scaled.double(), expected, rtol=0, atol=1e-7)


def test_digits_come_in_their_order_with_sixteen_levels():
    (train_x, train_y), (test_x, _) = read_digits().values()
    data = load_data("digits", train_images=100, valid_images=50, test_images=7)
    np.testing.assert_array_equal(data.valid_x, train_x[:50])
    np.testing.assert_array_equal(data.train_x, train_x[50:150])
    np.testing.assert_array_equal(data.train_y, train_y[50:150])
    np.testing.assert_array_equal(data.test_x, test_x[:7])
    assert torch.equal(data.scale(data.train_x), data.train_x.float().div(8).sub(1))
    assert load_data("digits").valid_x.shape == (0, 1, 8, 8)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"train_images": 0}, "train_images is 0, expected 1 or more"),
        ({"valid_images": -1}, "valid_images is -1, expected 0 or more"),
        ({"test_images": 0}, "test_images is 0, expected 1 or more"),
        ({"train_images": 1438}, "train_images is 1438, expected at most 1437"),
        ({"train_images": 1388, "valid_images": 50}, "train_images is 1388, expected at most 1387"),
        ({"valid_images": 1437}, "valid_images is 1437, expected at most 1436"),
        ({"test_images": 361}, "test_images is 361, expected at most 360"),
        ({"image_size": 5}, r"expected one of 1, 2, 4, 8$"),
    ],
)
def test_counts_that_the_set_does_not_have(counts, message):
    with pytest.raises(ConfigError, match=message):
        load_data("digits", **counts)


def test_to_moves_every_tensor():
    data = load_data("digits").to(torch.device("meta"))
    tensors = [x for x in vars(data).values() if isinstance(x, torch.Tensor)]
    assert [x.device.type for x in tensors] == ["meta"] * 6
    assert data.sample_shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("variable", "name", "root", "says"),
    [
        (
            ".",
            "mnist",
            None,
            r"MNIST was not found under {}:\n.*lacks train.*\nIt is published at http",
        ),
        (".", "svhn", None, r"\n  {}/svhn lacks train_32x32.mat, test_32x32.mat\n  {} lacks train"),
        (".", "mnist", "other", "MNIST was not found under {}/other:"),
        (None, "cifar10", None, "--data-root or the environment variable EBMGUARD_DATA"),
        ("", "frey", None, "or take the digits, which need none"),
        (".", "cifar10", "gone", "gone, which is not a folder: name another"),
        (".", "cifar", None, "data is 'cifar', expected one of digits, mnist, cifar10, cifar100"),
    ],
)
def test_where_a_data_set_is_looked_for(tmp_path, monkeypatch, variable, name, root, says):
    (tmp_path / "other").mkdir()
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    if variable is not None:
        monkeypatch.setenv("EBMGUARD_DATA", str(tmp_path) if variable else "")
    with pytest.raises(ConfigError, match=says.replace("{}", str(tmp_path))):
        load_data(name, root and tmp_path / root)


# -- smaller images --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_each_pixel_is_the_mean_of_its_square_as_a_fraction_a_half_rounded_up(size):
    images = np.random.default_rng(0).integers(256, size=(5, 3, 12, 12), dtype=np.uint8)
    small, side = shrunk(images, size), 12 // size
    assert small.dtype == np.uint8
    assert small.flags.c_contiguous
    assert small.shape == (5, 3, size, size)
    for n, c, row, column in np.ndindex(small.shape):
        square = images[n, c, row * side : (row + 1) * side, column * side : (column + 1) * side]
        mean = Fraction(sum(map(int, square.ravel())), side * side)
        assert small[n, c, row, column] == math.floor(mean + Fraction(1, 2))


def test_a_half_is_rounded_up_and_the_levels_stay():
    assert shrunk(np.zeros((0, 3, 8, 8), np.uint8), 4).shape == (0, 3, 4, 4)
    image = np.array([[0, 0, 1, 1], [0, 2, 0, 0], [255, 255, 16, 16], [255, 254, 16, 16]])
    small = shrunk(image[None, None].astype(np.uint8), 2)
    np.testing.assert_array_equal(small[0, 0], [[1, 1], [255, 16]])


@pytest.mark.parametrize("size", [-2, 0, 3, 8, 16, 56])
def test_a_size_that_is_no_divisor_is_refused_with_those_that_are(size):
    with pytest.raises(ConfigError) as caught:
        shrunk(np.zeros((1, 1, 28, 28), np.uint8), size)
    message = str(caught.value)
    assert f"image_size is {size}, and the images have 28x28 pixels" in message
    assert message.endswith("expected one of 1, 2, 4, 7, 14, 28")


def test_every_part_of_a_data_set_is_averaged_down_and_nothing_else_changes():
    counts = {"train_images": 90, "valid_images": 20, "test_images": 40}
    whole, small = load_data("digits", **counts), load_data("digits", **counts, image_size=4)
    for name in ("train", "valid", "test"):
        x, y = getattr(whole, f"{name}_x"), getattr(whole, f"{name}_y")
        np.testing.assert_array_equal(getattr(small, f"{name}_x"), shrunk(x.numpy(), 4))
        assert torch.equal(getattr(small, f"{name}_y"), y)
    assert (small.levels, small.classes, small.pad) == (16, 10, 0)
