"""The digits, CIFAR-10 and -100, MNIST, SVHN and the Frey faces as they were published.

Their readers raise a ConfigError where a file is missing or is not the published one, and an
ImportError where a package that reads it is not installed.
"""

from __future__ import annotations

import gzip
import io
import pickle
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ebmguard.errors import ConfigError

from .files import Images, PublishedFiles

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
    """50,000 training and 10,000 test images of 10 classes, colour, 32x32 (Krizhevsky 2009)."""
    return _cifar(root, files, b"labels")


def read_cifar100(root: Path, files: PublishedFiles = CIFAR100) -> Images:
    """50,000 training and 10,000 test images with their fine labels, 100 classes."""
    return _cifar(root, files, b"fine_labels")


def _cifar(root: Path, files: PublishedFiles, key: bytes) -> Images:
    def batch(raw: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy does not like its own old pickles
            # A pickle may call anything; this one has the checksum of the published file.
            content = pickle.loads(raw, encoding="bytes")
        # A row is an image: its red plane, then green, then blue.
        return content[b"data"].reshape(-1, 3, 32, 32), np.array(content[key], dtype=np.int64)

    *train, test = map(batch, files.contents(root).values())
    images, labels = zip(*train, strict=True)
    return {"train": (np.concatenate(images), np.concatenate(labels)), "test": test}


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
    """60,000 training and 10,000 test digits, grey, 28x28 (LeCun et al. 1998)."""
    train_x, train_y, test_x, test_y = map(_idx, files.contents(root).values())
    return {
        "train": (train_x[:, None], train_y.astype(np.int64)),
        "test": (test_x[:, None], test_y.astype(np.int64)),
    }


def _idx(content: bytes) -> NDArray[np.uint8]:
    """An array of bytes: two zeros, its type, its dimensions, its sizes (big-endian), its bytes."""
    raw = gzip.decompress(content)
    dimensions = raw[3]
    shape = np.frombuffer(raw, dtype=">u4", count=dimensions, offset=4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)


SVHN = PublishedFiles(
    title="SVHN (cropped digits)",
    page="http://ufldl.stanford.edu/housenumbers/",
    folders=("svhn", "."),
    md5={
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    },
)


def read_svhn(root: Path, files: PublishedFiles = SVHN) -> Images:
    """73,257 training and 26,032 test digits of houses, colour, 32x32 (Netzer et al. 2011)."""
    from scipy.io import loadmat

    def part(raw: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        content = loadmat(io.BytesIO(raw), variable_names=["X", "y"])
        # (H, W, C, N) and, for the digit 0, the label 10.
        images = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
        return images, content["y"].ravel().astype(np.int64) % 10

    train, test = map(part, files.contents(root).values())
    return {"train": train, "test": test}


DIGITS_TEST = 360
DIGITS_SEED = 0
"""The split is part of the data set: it is the same for every seed of a run."""


def read_digits(_: object = None) -> Images:
    """1,437 training and 360 test images of 10 classes, with grey levels 0..16.

    They are the test set of the UCI "Optical Recognition of Handwritten Digits" data. The split is
    stratified by label, fixed and in random order.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bundle = load_digits()
    images = bundle.images.astype(np.uint8)[:, None]
    labels = bundle.target.astype(np.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=DIGITS_TEST, stratify=labels, random_state=DIGITS_SEED
    )
    return {"train": (images[train], labels[train]), "test": (images[test], labels[test])}


FREY_FILE = "frey_rawface.mat"
FREY_PAGE = "https://cs.nyu.edu/~roweis/data.html"
FRAMES, FREY_HEIGHT, FREY_WIDTH = 1965, 28, 20
FREY_TRAIN, FREY_TEST = 1400, 265
"""The first and the last frames; those between are for validation, as in the published BiSM."""


def read_frey(root: Path) -> Images:
    """1,400 training, 300 validation and 265 test images, without labels (all are 0).

    Raises:
        ConfigError: the file is missing, or holds other arrays than the published one.
        ImportError: SciPy is not installed.
    """
    from scipy.io import loadmat

    path = root / FREY_FILE
    if not path.is_file():
        raise ConfigError(
            f"the Frey faces were not found: there is no {path}. They were published at "
            f"{FREY_PAGE} : put the file there, or take the digits in their place, which need none "
            "(--data digits)"
        )
    try:
        found = loadmat(io.BytesIO(path.read_bytes()), variable_names=["ff"]).get("ff")
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"{path} is no file of MATLAB that SciPy reads: {error}") from error
    shape = (FREY_HEIGHT * FREY_WIDTH, FRAMES)
    if found is None or found.shape != shape or found.dtype != np.uint8:
        what = "no array" if found is None else f"an array {found.shape} of {found.dtype}"
        raise ConfigError(f"{path} holds {what} by the name of ff, expected {shape} of uint8")
    # (D, N), every image row by row.
    images = np.ascontiguousarray(found.T).reshape(FRAMES, 1, FREY_HEIGHT, FREY_WIDTH)
    parts = np.split(images, [FREY_TRAIN, FRAMES - FREY_TEST])
    return {
        name: (part, np.zeros(len(part), dtype=np.int64))
        for name, part in zip(("train", "valid", "test"), parts, strict=True)
    }
