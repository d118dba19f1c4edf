"""The settings of short-run training, by data set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..engine.run_config import below, counts, not_positive

ActivationName = Literal["leaky_relu", "gelu"]
InitName = Literal["noise", "persistent"]
OptimizerName = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Preset:
    """One training setup, by the names of the options of :class:`.config.ShortRunConfig`.

    x += step_size * df/dx + noise_std * z, K times; K is drawn uniformly for each update. The
    defaults are the published script's own settings (Nijkamp et al. 2019).
    """

    image_size: int | None = None
    train_images: int | None = None
    test_images: int | None = None
    nf: int = 64
    activation: ActivationName = "leaky_relu"
    iterations: int = 100_000
    optimizer: OptimizerName = "adam"
    lr: float = 1e-4
    batch: int = 64
    data_noise: float = 0.03
    init: InitName = "noise"
    buffer_size: int = 10_000
    sgld_steps: int = 100
    most_sgld_steps: int = 100
    step_size: float = 1.0
    noise_std: float = 0.01
    sample_every: int = 1000

    @property
    def output_scale(self) -> float:
        """The factor o for which the Langevin step is correct for exp(o f)."""
        return 2 * self.step_size / self.noise_std**2

    def problems(self) -> list[str]:
        """Settings that cannot be meant: the name of each, its value and what was expected."""
        problems = below(self, **counts(self))
        problems += not_positive(self, "lr", "step_size", "noise_std")
        problems += not_positive(self, "data_noise", or_0=True)
        if self.most_sgld_steps < self.sgld_steps:
            problems.append(
                f"most_sgld_steps is {self.most_sgld_steps}, expected sgld_steps, "
                f"{self.sgld_steps}, or more"
            )
        return problems


CIFAR10 = Preset()

_SMALL = replace(CIFAR10, activation="gelu", lr=3e-4, sample_every=100)
"""Networks this narrow bear a larger learning rate, and a small run is short. GELU, so that one run
serves all studies, likelihoods included."""

PRESETS: dict[str, Preset] = {
    "cifar10": CIFAR10,
    # As many images as the paper trained on.
    "celeba64": replace(CIFAR10, train_images=40_000, test_images=10_000),
    # Ours, for two CPU cores: digits in some 10 minutes, MNIST in 15.
    "mnist": replace(_SMALL, image_size=14, nf=16, iterations=3000),
    "digits": replace(_SMALL, lr=1e-3, nf=32, iterations=3000),
}
"""By data set."""
