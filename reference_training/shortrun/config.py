"""Settings of the short-run trainer: presets by data set, and what overrides them, the command."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ebmguard.errors import ConfigError

from ..engine.ranks import ONE_RANK, Ranks
from ..engine.run_config import below, counts, not_positive, refuse
from ..image_config import ImageConfig

if TYPE_CHECKING:  # the help needs no torch
    from ..data import ImageData
    from .network import EnergyNet


ActivationName = Literal["leaky_relu", "gelu"]
InitName = Literal["noise", "persistent"]
OptimizerName = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Preset:
    """One training setup, by the names of the options of :class:`ShortRunConfig`.

    x += step_size * df/dx + noise_std * z, K times; K is drawn uniformly for each update. The
    defaults are the published script's own settings (Nijkamp et al. 2019).
    """

    image_size: int | None = None
    train_images: int | None = None
    valid_images: ClassVar[int] = 0  # the published script trains on every image
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


@dataclass(frozen=True)
class ShortRunConfig(ImageConfig):
    """Train a short-run MCMC energy-based model (Nijkamp et al. 2019), watched by the guard.

    Negatives are K Langevin steps from uniform noise, anew at every update. What the data set's
    preset sets can be overridden by name; None is the preset's value, that of cifar10 is the
    published one. Counts of images and samples are those of all GPUs together. The run folder gets
    config.json, metrics.jsonl and alerts.jsonl (the guard's), TensorBoard events, results.json,
    samples/, figures/ and checkpoints/. `ebmguard figure 12` and the figures beside it study it.
    """

    data: Literal["digits", "mnist", "cifar10", "celeba64"] = "digits"
    """Data set: the digits, scikit-learn's 1,797 real 8x8 images, need no download; celeba64 are
    the aligned faces of CelebA, cropped and averaged down to 64x64."""
    beta_star: float = 0.02
    """Exponent of the guard's weights on raw outputs: β times the output scale, 20,000 with the
    published step_size and noise_std. 0 is the standard trainer. The paper could train with 0.02,
    and no more with 200."""
    action: Literal["warn", "raise"] = "warn"
    """What an alert of level ERROR leads to: raise ends the run."""
    nf: int | None = None
    """Width of the network: the channels of its first convolution."""
    activation: ActivationName | None = None
    """leaky_relu is the published one; likelihoods need gelu."""
    optimizer: OptimizerName | None = None
    """adam, as published for short runs; or sgd, without momentum, for convergent learning."""
    batch: int | None = None
    """Images, and chains, of an update."""
    init: InitName | None = None
    """Where chains start: from noise at every update, or persistent, where they were."""
    sgld_steps: int | None = None
    """K, Langevin steps from noise to a negative."""
    most_sgld_steps: int | None = None
    """With a number above sgld_steps, K is drawn from between them, anew for each update."""
    sample_every: int | None = None
    """Updates between the samples that are kept."""
    start_from: str | None = None
    """Run whose network, as its last checkpoint has it, this one starts with."""

    words: ClassVar[tuple[str, ...]] = ("ebmguard", "train", "shortrun")

    def make_network(self, data: ImageData) -> EnergyNet:
        """The network as its seed initialises it; PyTorch's global generators are left alone."""
        from ..device import autocast_type
        from ..networks import seeded
        from .network import EnergyNet

        channels, size, _ = data.sample_shape
        settings, autocast = self.settings, autocast_type(self.precision)
        options: dict[str, Any] = {"nf": settings.nf, "activation": settings.activation}
        make = partial(EnergyNet, channels, size, autocast=autocast, **options)
        return seeded(make, self.seed, data.train_x.device)

    @property
    def settings(self) -> Preset:
        """The preset with what is overridden; K is fixed unless both ends are set."""
        preset = self.over(PRESETS[self.data])
        if self.sgld_steps is not None and self.most_sgld_steps is None:
            preset = replace(preset, most_sgld_steps=self.sgld_steps)
        return preset

    def check(self, ranks: Ranks = ONE_RANK) -> None:
        """Refuse settings that cannot be meant, or not be divided among the processes."""
        settings = self.settings
        wrong = settings.problems()
        problems = self.problems()
        if not wrong and settings.output_scale <= self.beta_star < math.inf:
            problems.append(
                f"beta_star is {self.beta_star}, expected less than the output scale, "
                f"{settings.output_scale:g}: f is not in the sampler at it, and upside down beyond"
            )
        problems += wrong
        if settings.init == "persistent" and settings.buffer_size < settings.batch:
            problems.append(
                f"buffer_size is {settings.buffer_size}, expected the batch, {settings.batch}, or "
                "more"
            )
        problems += ranks.undivided(batch=settings.batch)
        refuse(problems)
        data = self.load_data()
        if self.start_from is not None and not self.resume:  # before there is a folder
            from .network import start_from

            start_from(self.make_network(data), Path(self.start_from), settings.activation)

    def resumed(self, stored: Mapping[str, Any]) -> Self:
        """These settings over those of the run that is resumed, or opened to be studied.

        Where a preset has changed since the run began, the run's own value counts.
        """
        was = stored.get("settings", {})
        if "most_sgld_steps" not in was:
            raise ConfigError(f"{self.out} is not a run of `ebmguard {' '.join(self.words[1:])}`")
        config = super().resumed(stored)
        now = asdict(config.settings).items()
        unset = {name: value for name, value in now if getattr(config, name) is None}
        return replace(config, **{k: was[k] for k in unset if was.get(k, unset[k]) != unset[k]})

    def to_json(self) -> dict[str, Any]:
        """The settings and the resolved preset as plain JSON values."""
        return {**super().to_json(), "settings": asdict(self.settings)}
