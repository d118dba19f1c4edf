"""The Frey faces (Roweis and Saul 2000): 1,965 grey frames of one face, 28x20, for MATLAB."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ebmguard.errors import ConfigError

from .files import needs
from .image_data import Images

FILE = "frey_rawface.mat"
PAGE = "https://cs.nyu.edu/~roweis/data.html"
FRAMES, HEIGHT, WIDTH = 1965, 28, 20
TRAIN, TEST = 1400, 265
"""The first and the last frames; those between are for validation, as in the published BiSM."""


def read_frey(root: Path) -> Images:
    """1,400 training, 300 validation and 265 test images, without labels (all are 0).

    Raises:
        ConfigError: the file is missing, or holds other arrays than the published one.
        ImportError: SciPy is not installed.
    """
    with needs("SciPy, which reads the Frey faces"):
        from scipy.io import loadmat
    path = root / FILE
    if not path.is_file():
        raise ConfigError(
            f"the Frey faces were not found: there is no {path}. They were published at {PAGE} : "
            "put the file there, or take the digits in their place, which need none (--data digits)"
        )
    try:
        found = loadmat(io.BytesIO(path.read_bytes()), variable_names=["ff"]).get("ff")
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"{path} is no file of MATLAB that SciPy reads: {error}") from error
    shape = (HEIGHT * WIDTH, FRAMES)
    if found is None or found.shape != shape or found.dtype != np.uint8:
        what = "no array" if found is None else f"an array {found.shape} of {found.dtype}"
        raise ConfigError(f"{path} holds {what} by the name of ff, expected {shape} of uint8")
    if np.ptp(found) < 128:
        raise ConfigError(
            f"{path} holds grey levels {found.min()} to {found.max()}, expected most of 0 to 255"
        )
    # (D, N), every image row by row.
    images = np.ascontiguousarray(found.T).reshape(FRAMES, 1, HEIGHT, WIDTH)
    train, valid, test = np.split(images, [TRAIN, FRAMES - TEST])
    labels = [np.zeros(len(part), dtype=np.int64) for part in (train, valid, test)]
    return Images(train, labels[0], test, labels[2], (valid, labels[1]))
