"""Data sets by name, split into training, validation and test images."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebmguard.errors import ConfigError

from . import published
from .celeba import read_celeba
from .download import fetch
from .files import Images, PublishedFiles

SPLIT_SEED = 1234
VALID_IMAGES = 5000
ROOT_VARIABLE = "EBMGUARD_DATA"
"""Environment variable that names the folder of the data sets."""


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


@dataclass(frozen=True)
class _DataSet:
    """How a data set is read; padding and flips as in JEM (Grathwohl et al. 2020)."""

    read: Callable[[Path], Images]
    files: PublishedFiles | None = None
    classes: int = 10
    levels: int = 255
    pad: int = 0
    flip: bool = False


_SETS: Mapping[str, _DataSet] = {
    "digits": _DataSet(published.read_digits, levels=16),
    "mnist": _DataSet(published.read_mnist, published.MNIST),
    "cifar10": _DataSet(published.read_cifar10, published.CIFAR10, pad=4, flip=True),
    "cifar100": _DataSet(
        published.read_cifar100, published.CIFAR100, classes=100, pad=4, flip=True
    ),
    "svhn": _DataSet(published.read_svhn, published.SVHN, pad=4),
    "celeba64": _DataSet(read_celeba, classes=1),  # no labels; short runs are not augmented
    "frey": _DataSet(published.read_frey, classes=1),
}
DATA_SETS: tuple[str, ...] = (*_SETS,)
"""Names that `--data` takes."""


def kept_data(
    name: str, root: str | None, download: bool = False, **counts: int | None
) -> ImageData:
    """As :func:`load_data`, kept while the same is asked for; no root is $EBMGUARD_DATA.

    With `download` it is fetched first, where it is missing. CelebA and the Frey faces are
    published behind a form, or no more: their errors say where.
    """
    value = root or os.environ.get(ROOT_VARIABLE)
    folder = Path(value) if value else None
    if download and name in _SETS and (files := _SETS[name].files) is not None:
        fetch(files, _root(name, folder))
    return _kept(name, folder, **counts)


def load_data(
    name: str,
    root: Path | None = None,
    *,
    train_images: int | None = None,
    valid_images: int | None = None,
    test_images: int | None = None,
    image_size: int | None = None,
) -> ImageData:
    """A data set with JEM's split, on the CPU.

    The published training images are shuffled with NumPy's legacy generator seeded 1234; the first
    so many are for validation and the rest for training, as in JEM's published trainer (Grathwohl
    et al. 2020). The split is thus the same for every seed of a run. The digits come in random
    order and are not shuffled again. The faces of CelebA and Frey's have a validation set of their
    own, of which the first so many are taken; of CelebA's shuffled training images none but those
    asked for are decoded.

    Args:
        name: one of :data:`DATA_SETS`.
        root: folder of the data sets; None takes the environment variable EBMGUARD_DATA. The
            digits come with scikit-learn and need none.
        train_images: only the first so many; None takes all.
        valid_images: size of the validation set; None takes 5000, or 0 of the digits.
        test_images: only the first so many; None takes all.
        image_size: height and width that the images are averaged down to, such as 14 for MNIST, a
            divisor of theirs; None leaves them as they are.

    Raises:
        ConfigError: there is no such data set or folder, a file is missing or is not the published
            one, the set has fewer images than asked for, or they cannot be made that small.
        ImportError: the package that carries or reads the data is not installed.
    """
    counts = {"valid": valid_images, "train": train_images, "test": test_images}
    for part, count in counts.items():
        least = 0 if part == "valid" else 1
        if count is not None and count < least:
            raise ConfigError(f"{part}_images is {count}, expected {least} or more")
    if name not in _SETS:
        raise ConfigError(f"data is {name!r}, expected one of {', '.join(DATA_SETS)}")
    own, is_digits = _SETS[name], name == "digits"
    images = own.read(Path() if is_digits else _root(name, root))
    rows = {part: np.arange(len(x)) for part, (x, _) in images.items()}
    if not is_digits:
        np.random.RandomState(SPLIT_SEED).shuffle(rows["train"])
    if valid_images is None:
        counts["valid"] = 0 if is_digits else VALID_IMAGES
    found: dict[str, Any] = {n: getattr(own, n) for n in ("classes", "levels", "pad", "flip")}
    for part, count in counts.items():
        is_taken = part not in images  # from the training images, which keep one
        x, y = images["train" if is_taken else part]
        left = rows["train" if is_taken else part]
        most = len(left) - is_taken
        if count is not None and count > most:
            raise ConfigError(
                f"{part}_images is {count}, expected at most {most}: {name} has no more"
            )
        if is_taken:
            rows["train"] = left[count:]
        pixels = x[left[:count]]
        found[f"{part}_x"] = torch.from_numpy(
            pixels if image_size is None else shrunk(pixels, image_size)
        )
        found[f"{part}_y"] = torch.from_numpy(y[left[:count]])
    return ImageData(name, **found)


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
    squares = images.reshape(count, channels, size, side, size, side)
    means: NDArray[np.uint32] = squares.sum(axis=(3, 5), dtype=np.uint32)
    # In place: of all faces of CelebA they are gigabytes.
    means *= 2
    means += side * side
    means //= 2 * side * side
    return means.astype(np.uint8)


def _root(name: str, root: Path | None) -> Path:
    if root is None:
        value = os.environ.get(ROOT_VARIABLE)
        if not value:
            raise ConfigError(
                f"{name} lies in files, and no folder was named to look in: name the folder of the "
                f"data sets by --data-root or the environment variable {ROOT_VARIABLE}; or take "
                "the digits, which need none"
            )
        root = Path(value)
    if not root.is_dir():
        raise ConfigError(
            f"the folder of the data sets is {root}, which is not a folder: name another by "
            f"--data-root or the environment variable {ROOT_VARIABLE}"
        )
    return root


_kept = lru_cache(maxsize=1)(load_data)
