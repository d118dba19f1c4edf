"""MNIST (LeCun et al. 1998): 70,000 handwritten digits, grey images of 28x28, as idx files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .files import PublishedFiles
from .images import Images

MNIST = PublishedFiles(
    title="MNIST",
    page="https://ossci-datasets.s3.amazonaws.com/mnist/",
    folders=("MNIST/raw",),
    md5={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)


def read_mnist(root: Path, files: PublishedFiles = MNIST) -> Images:
    """60,000 training and 10,000 test images of 10 classes.

    Raises:
        ConfigError: a file is missing or is not the published one.
    """
    folder = files.find(root)
    train_x, train_y, test_x, test_y = (_idx(files.read(folder / name)) for name in files.md5)
    return Images(
        train_x[:, None], train_y.astype(np.int64), test_x[:, None], test_y.astype(np.int64)
    )


def _idx(content: bytes) -> NDArray[np.uint8]:
    """An array of bytes: two zeros, its type, its dimensions, its sizes (big-endian), its bytes."""
    raw = gzip.decompress(content)
    dimensions = raw[3]
    shape = np.frombuffer(raw, dtype=">u4", count=dimensions, offset=4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)
