"""Data sets of the reference trainers, as tensors scaled to [-1, 1]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

TEST_IMAGES = 360
SPLIT_SEED = 0
"""The split is part of the data set: it is the same for every seed of a run."""


@dataclass(frozen=True)
class ImageData:
    """A labelled image data set with a fixed split.

    Attributes:
        train_x: (N, C, H, W) float32 in [-1, 1].
        train_y: (N,) int64.
        test_x: (T, C, H, W) float32 in [-1, 1].
        test_y: (T,) int64.
        classes: number of labels.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one image, (C, H, W)."""
        return tuple(self.train_x.shape[1:])

    def to(self, device: torch.device) -> ImageData:
        """The same data on `device`."""
        return replace(
            self,
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
        )


def load_digits() -> ImageData:
    """The 1,797 handwritten digits of scikit-learn: 8x8 grey images, carried by the package.

    They are the test set of the UCI "Optical Recognition of Handwritten Digits" data. The grey
    levels 0..16 are scaled to [-1, 1]. The split of 1,437 training and 360 test images is
    stratified by label and fixed.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as sklearn_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed: "
            'pip install "ebmguard[train]"'
        ) from error
    bundle = sklearn_digits()
    images = torch.from_numpy(bundle.images).to(torch.float32).div(8.0).sub(1.0).unsqueeze(1)
    labels = torch.from_numpy(bundle.target).to(torch.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=TEST_IMAGES, stratify=bundle.target, random_state=SPLIT_SEED
    )
    return ImageData(
        train_x=images[train],
        train_y=labels[train],
        test_x=images[test],
        test_y=labels[test],
        classes=10,
    )


DATA_SETS: dict[str, Callable[[], ImageData]] = {"digits": load_digits}
"""Data sets by the name that `--data` takes."""
