"""What an update does; and the settings of the deep models, published and for two cores."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from ..engine.run_config import below, not_positive

LowerName = Literal["elbo", "fisher"]
MATCHING = ("dsm", "ssm", "mdsm")
BILEVEL = tuple(f"bi{name}" for name in MATCHING)
POSTERIORS = (*BILEVEL, "vnce")
METHODS = (
    *(*MATCHING, *BILEVEL, "nce", "vnce"),
    *(f"{name}{steps}" for name in ("cd", "pcd") for steps in (1, 5, 10)),
)
"""All, chains by three lengths."""
CHAINS = re.compile(r"(p?)cd([1-9]\d*)")
HELD = 0.1
"""Noise at which a model of many levels is the density, as published."""


@dataclass(frozen=True)
class UpdateSettings:
    """What an update does; the defaults are the published ones for two-dimensional data."""

    method: str = "bidsm"
    """bidsm, bissm, bimdsm: score matching through a posterior, bi-level. dsm, ssm, mdsm: of f.
    nce, vnce: noise contrast. cdK, pcdK: contrastive divergence by K Gibbs steps (cd1, pcd10)."""
    lr: float = 1e-3
    """Learning rate of Adam, for the model and for the posterior."""
    noise_std: float = 0.05
    """Noise of (bi)dsm."""
    noise_range: tuple[float, float] = (0.1, 3.0)
    """Noise of (bi)mdsm over a minibatch, from the least to the most."""
    noise_spacing: Literal["geometric", "linear"] = "geometric"
    """Steps of that noise."""
    lower: LowerName = "elbo"
    """What the posterior is trained by: elbo, or fisher, the conditional Fisher divergence."""
    inner_steps: int = 5
    """K: Adam steps of the posterior on each minibatch."""
    unrolled_steps: int = 5
    """N: further steps that the model's gradient goes through."""
    fresh_inner: bool = False
    """A minibatch of its own for each of the K steps, instead of that of the update."""

    @property
    def has_chains(self) -> bool:
        """Whether chains are all that is random in an update; then ranks draw numbers apart."""
        return CHAINS.fullmatch(self.method) is not None

    @property
    def held(self) -> float:
        """Noise of the data whose density the model learns; 0 of a method without noise."""
        return {"dsm": self.noise_std, "mdsm": HELD}.get(self.method.removeprefix("bi"), 0.0)

    def rate(self, step: int) -> float:
        """The learning rate's factor at an update."""
        return 1.0

    def update_problems(self) -> list[str]:
        """What cannot be meant, and what was expected."""
        problems = below(self, inner_steps=0, unrolled_steps=0)
        problems += not_positive(self, "lr", "noise_std")
        low, high = self.noise_range
        if not 0 < low < high:
            problems.append(f"noise_range is {low} to {high}, expected 0 < least < most")
        named = (*MATCHING, *POSTERIORS, "nce")
        if self.method not in named and not CHAINS.fullmatch(self.method):
            problems.append(f"method is {self.method!r}, expected {', '.join(named)}, cdK or pcdK")
        return problems


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
    lower: LowerName = "fisher"
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
        """A cosine from 1 to 0."""
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
