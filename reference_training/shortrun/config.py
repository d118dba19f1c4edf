"""Settings of the short-run trainer: one frozen dataclass, which is also its command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ebmguard.errors import ConfigError

from ..engine.ranks import ONE_RANK, Ranks
from ..engine.run_config import refuse
from ..image_config import ImageConfig
from .presets import PRESETS, ActivationName, InitName, OptimizerName, Preset

if TYPE_CHECKING:  # the help needs no torch
    from ..data import ImageData
    from .network import EnergyNet


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
    test_images: int | None = None
    """Test images that are used, for analyses; training does not look at them."""
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

    def load_data(self) -> ImageData:
        """The data, on the CPU; read once and kept while the settings ask for the same."""
        from ..data import kept_data

        settings = self.settings
        # The published script trains on every image: none is put aside for a validation.
        return kept_data(
            self.data,
            self.data_root,
            self.download,
            train_images=settings.train_images,
            valid_images=0,
            test_images=settings.test_images,
            image_size=settings.image_size,
        )

    def make_network(self, data: ImageData) -> EnergyNet:
        """The network as its seed initialises it; PyTorch's global generators are left alone."""
        from ..networks import seeded
        from ..precision import autocast_type
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
