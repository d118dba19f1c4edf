"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 60,000 colour images of 32x32, as Python pickles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .files import PublishedFiles
from .images import Images
from .pickles import read_pickle

CIFAR10 = PublishedFiles(
    title="CIFAR-10 (python version)",
    page="https://www.cs.toronto.edu/~kriz/cifar.html",
    folders=("cifar-10-batches-py",),
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    archive=(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
    ),
)
CIFAR100 = PublishedFiles(
    title="CIFAR-100 (python version)",
    page="https://www.cs.toronto.edu/~kriz/cifar.html",
    folders=("cifar-100-python",),
    md5={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
    archive=(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
    ),
)


def read_cifar10(root: Path, files: PublishedFiles = CIFAR10) -> Images:
    """50,000 training and 10,000 test images of 10 classes.

    Raises:
        ConfigError: a file is missing or is not the published one.
    """
    return _read(root, files, b"labels")


def read_cifar100(root: Path, files: PublishedFiles = CIFAR100) -> Images:
    """50,000 training and 10,000 test images with their fine labels, 100 classes.

    Raises:
        ConfigError: a file is missing or is not the published one.
    """
    return _read(root, files, b"fine_labels")


def _read(root: Path, files: PublishedFiles, key: bytes) -> Images:
    folder = files.find(root)

    def batch(name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        content = read_pickle(files.read(folder / name), folder / name)
        # A row is an image: its red plane, then green, then blue.
        return content[b"data"].reshape(-1, 3, 32, 32), np.array(content[key], dtype=np.int64)

    *train_names, test_name = files.md5
    images, labels = zip(*map(batch, train_names), strict=True)
    test_x, test_y = batch(test_name)
    return Images(np.concatenate(images), np.concatenate(labels), test_x, test_y)
