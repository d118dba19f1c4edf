"""Data sets by name, split into training, validation and test images."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ebmguard.errors import ConfigError

from .celeba import read_celeba
from .download import fetch
from .files import PublishedFiles
from .image_data import ImageData, Images
from .published import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    read_cifar10,
    read_cifar100,
    read_digits,
    read_frey,
    read_mnist,
    read_svhn,
)
from .shrink import shrunk

SPLIT_SEED = 1234
VALID_IMAGES = 5000
ROOT_VARIABLE = "EBMGUARD_DATA"
"""Environment variable that names the folder of the data sets."""


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
    "digits": _DataSet(read_digits, levels=16),
    "mnist": _DataSet(read_mnist, MNIST),
    "cifar10": _DataSet(read_cifar10, CIFAR10, pad=4, flip=True),
    "cifar100": _DataSet(read_cifar100, CIFAR100, classes=100, pad=4, flip=True),
    "svhn": _DataSet(read_svhn, SVHN, pad=4),
    "celeba64": _DataSet(read_celeba, classes=1),  # no labels; short runs are not augmented
    "frey": _DataSet(read_frey, classes=1),
}
DATA_SETS: tuple[str, ...] = (*_SETS,)
"""Names that `--data` takes."""


def kept_data(
    name: str, root: str | None, download: bool = False, **counts: int | None
) -> ImageData:
    """As :func:`load_data`, kept while the same is asked for; no root is $EBMGUARD_DATA.

    Args:
        name: of the data set.
        root: folder of the data sets.
        download: fetch it first, where it is missing. CelebA and the Frey faces are published
            behind a form, or no more: their errors say where.
        **counts: as there.
    """
    folder = root or os.environ.get(ROOT_VARIABLE)
    files = _SETS[name].files if download and name in _SETS else None
    if files is not None:
        fetch(files, Path(folder) if folder else _root(name, None))
    return _kept(name, Path(folder) if folder else None, **counts)


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
    for setting, value, least in (
        ("train_images", train_images, 1),
        ("valid_images", valid_images, 0),
        ("test_images", test_images, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{setting} is {value}, expected {least} or more")
    if name not in _SETS:
        raise ConfigError(f"data is {name!r}, expected one of {', '.join(DATA_SETS)}")
    own, is_digits = _SETS[name], name == "digits"
    images = own.read(Path() if is_digits else _root(name, root))
    order = np.arange(len(images.train_x))
    if not is_digits:
        np.random.RandomState(SPLIT_SEED).shuffle(order)
    if valid_images is None:
        valid_images = 0 if is_digits else VALID_IMAGES
    if images.valid is None:
        valid_x, valid_y = images.train_x, images.train_y
        valid = _first(valid_images, order, name, "valid_images", spare=1)
        order = order[valid_images:]
    else:
        valid_x, valid_y = images.valid
        valid = _first(valid_images, np.arange(len(valid_x)), name, "valid_images")
    train = _first(train_images, order, name, "train_images")
    test = _first(test_images, np.arange(len(images.test_x)), name, "test_images")

    def pixels(x: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(x if image_size is None else shrunk(x, image_size))

    return ImageData(
        name=name,
        train_x=pixels(images.train_x[train]),
        train_y=torch.from_numpy(images.train_y[train]),
        valid_x=pixels(valid_x[valid]),
        valid_y=torch.from_numpy(valid_y[valid]),
        test_x=pixels(images.test_x[test]),
        test_y=torch.from_numpy(images.test_y[test]),
        classes=own.classes,
        levels=own.levels,
        pad=own.pad,
        flip=own.flip,
    )


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


def _first(
    count: int | None, rows: NDArray[np.int64], name: str, setting: str, spare: int = 0
) -> NDArray[np.int64]:
    most = len(rows) - spare
    if count is not None and count > most:
        raise ConfigError(f"{setting} is {count}, expected at most {most}: {name} has no more")
    return rows[:count]


_kept = lru_cache(maxsize=1)(load_data)
