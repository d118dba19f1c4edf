"""SVHN, cropped digits (Netzer et al. 2011): house numbers, colour images of 32x32, for MATLAB."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .files import PublishedFiles
from .images import Images

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
    """73,257 training and 26,032 test images of 10 classes.

    Raises:
        ConfigError: a file is missing or is not the published one.
        ImportError: SciPy is not installed.
    """
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError(
            'SVHN is read by SciPy, which is not installed: pip install "ebmguard[train]"'
        ) from error
    folder = files.find(root)

    def part(name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        content = loadmat(io.BytesIO(files.read(folder / name)), variable_names=["X", "y"])
        # (H, W, C, N) and, for the digit 0, the label 10.
        images = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
        return images, content["y"].ravel().astype(np.int64) % 10

    train_name, test_name = files.md5
    return Images(*part(train_name), *part(test_name))
