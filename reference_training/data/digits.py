"""The digits of scikit-learn: 1,797 grey images of 8x8 that its package carries."""

from __future__ import annotations

import numpy as np

from .files import needs
from .image_data import Images

TEST_IMAGES = 360
SPLIT_SEED = 0
"""The split is part of the data set: it is the same for every seed of a run."""


def read_digits(_: object = None) -> Images:
    """1,437 training and 360 test images of 10 classes, with grey levels 0..16.

    They are the test set of the UCI "Optical Recognition of Handwritten Digits" data. The split is
    stratified by label, fixed and in random order.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    with needs("scikit-learn, with which the digits come"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    bundle = load_digits()
    images = bundle.images.astype(np.uint8)[:, None]
    labels = bundle.target.astype(np.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=TEST_IMAGES, stratify=labels, random_state=SPLIT_SEED
    )
    return Images(images[train], labels[train], images[test], labels[test])
