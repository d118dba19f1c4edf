"""The settings of short-run training, by data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from ..engine.run_config import below, counts, not_positive

ActivationName = Literal["leaky_relu", "gelu"]
InitName = Literal["noise", "persistent"]
OptimizerName = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Preset:
    """One training setup, by the names of the options of :class:`.config.ShortRunConfig`.

    x += step_size * df/dx + noise_std * z, K times; K is drawn uniformly for each update.
    """

    image_size: int | None
    train_images: int | None
    test_images: int | None
    nf: int
    activation: ActivationName
    iterations: int
    optimizer: OptimizerName
    lr: float
    batch: int
    data_noise: float
    init: InitName
    buffer_size: int
    sgld_steps: int
    most_sgld_steps: int
    step_size: float
    noise_std: float
    sample_every: int

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
        for name, known in (
            ("activation", ActivationName),
            ("init", InitName),
            ("optimizer", OptimizerName),
        ):
            if getattr(self, name) not in get_args(known):
                expected = " or ".join(get_args(known))
                problems.append(f"{name} is {getattr(self, name)!r}, expected {expected}")
        return problems

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return asdict(self)


CIFAR10 = Preset(
    image_size=None,
    train_images=None,
    test_images=None,
    nf=64,
    activation="leaky_relu",
    iterations=100_000,
    optimizer="adam",
    lr=1e-4,
    batch=64,
    data_noise=0.03,
    init="noise",
    buffer_size=10_000,
    sgld_steps=100,
    most_sgld_steps=100,
    step_size=1.0,
    noise_std=0.01,
    sample_every=1000,
)
"""The published script's own settings (Nijkamp et al. 2019)."""

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
