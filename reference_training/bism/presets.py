"""The settings of the deep models, by data set: the published ones, and those of two cores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .methods import UpdateSettings

__all__ = ["PUBLISHED", "SMALL", "DeepSettings"]


@dataclass(frozen=True)
class DeepSettings(UpdateSettings):
    """One training setup, by the names of the options; those of MNIST as published.

    Attributes:
        blocks: residual blocks of the network, a multiple of 3.
        widths: channels of the Gaussian posterior's three convolutions.
    """

    method: str = "bimdsm"
    lr: float = 1e-4
    unrolled_steps: int = 0
    lower: str = "fisher"
    image_size: int | None = None
    train_images: int | None = None
    test_images: int | None = None
    hidden: int = 50
    channels: int = 64
    blocks: int = 6
    widths: tuple[int, int, int] = (64, 128, 256)
    iterations: int = 100_000
    batch: int = 100

    def rate(self, step: int) -> float:
        """The learning rate's factor at an update: a cosine from 1 to 0."""
        return (1 + math.cos(math.pi * step / self.iterations)) / 2


PUBLISHED: dict[str, DeepSettings] = {
    "mnist": DeepSettings(),
    "cifar10": DeepSettings(
        lr=5e-5,
        noise_range=(0.05, 1.2),
        noise_spacing="linear",
        channels=128,
        blocks=9,
        iterations=300_000,
    ),
}
"""By data set."""
_SMALL = DeepSettings(
    lr=1e-3, hidden=20, channels=8, blocks=3, widths=(8, 16, 32), iterations=3000, batch=50
)
SMALL: dict[str, DeepSettings] = {
    "digits": replace(_SMALL, channels=16),
    "mnist": replace(_SMALL, image_size=14, test_images=2000),
    "cifar10": replace(_SMALL, image_size=16, noise_range=(0.05, 1.2), noise_spacing="linear"),
}
"""Ours, for two CPU cores. Of the digits there are no published ones."""
