"""Settings of the short-run trainer: one frozen dataclass, which is also its command line."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from ebmguard.errors import ConfigError

from ..compiling import CompileName
from ..data import ROOT_VARIABLE, ImageData, load_data
from ..engine.ranks import ONE_RANK, Ranks
from ..engine.run_config import RunConfig
from ..precision import PrecisionName
from .network import ActivationName
from .presets import PRESETS, InitName, OptimizerName, Preset
from .start import make_network, start_from

DataName = Literal["digits", "mnist", "cifar10", "celeba64"]
ActionName = Literal["warn", "raise"]


@dataclass(frozen=True)
class ShortRunConfig(RunConfig):
    """Train a short-run MCMC energy-based model (Nijkamp et al. 2019), watched by the guard.

    Negatives are K Langevin steps from uniform noise, anew at every update. What the data set's
    preset sets can be overridden by name; None is the preset's value, that of cifar10 is the
    published one. Counts of images and samples are those of all GPUs together. The run folder gets
    config.json, metrics.jsonl and alerts.jsonl (the guard's), TensorBoard events, results.json,
    samples/, figures/ and checkpoints/. `ebmguard figure 12` and the figures beside it study it.
    """

    data: DataName = "digits"
    """Data set: the digits, scikit-learn's 1,797 real 8x8 images, need no download; celeba64 are
    the aligned faces of CelebA, cropped and averaged down to 64x64."""
    data_root: str | None = None
    """Folder of the other data sets; None is the environment variable EBMGUARD_DATA."""
    beta_star: float = 0.02
    """Exponent of the guard's weights on raw outputs: β times the output scale, 20,000 with the
    published step_size and noise_std. 0 is the standard trainer. The paper could train with 0.02,
    and no more with 200."""
    most_steps: int = 1
    """Up to so many times the Langevin steps, each as much finer, while GradScale is low; a power
    of two. 1: never more."""
    action: ActionName = "warn"
    """What an alert of level ERROR leads to: raise ends the run."""
    image_size: int | None = None
    """Pixels a side to which images are averaged down."""
    train_images: int | None = None
    """Training images that are used."""
    test_images: int | None = None
    """Test images that are used, for analyses; training does not look at them."""
    nf: int | None = None
    """Width of the network: the channels of its first convolution."""
    activation: ActivationName | None = None
    """leaky_relu is the published one; likelihoods need gelu."""
    iterations: int | None = None
    """Updates."""
    optimizer: OptimizerName | None = None
    """adam, as published for short runs; or sgd, without momentum, for convergent learning."""
    lr: float | None = None
    """Learning rate."""
    batch: int | None = None
    """Images, and chains, of an update."""
    data_noise: float | None = None
    """Standard deviation of the noise added to the images."""
    init: InitName | None = None
    """Where chains start: from noise at every update, or persistent, where they were."""
    buffer_size: int | None = None
    """Persistent chains."""
    sgld_steps: int | None = None
    """K, Langevin steps from noise to a negative."""
    most_sgld_steps: int | None = None
    """With a number above sgld_steps, K is drawn from between them, anew for each update."""
    step_size: float | None = None
    """Factor of the gradient in a Langevin step."""
    noise_std: float | None = None
    """Standard deviation of the noise in a Langevin step."""
    sample_every: int | None = None
    """Updates between the samples that are kept."""
    start_from: str | None = None
    """Run whose network, as its last checkpoint has it, this one starts with."""
    precision: PrecisionName = "float32"
    """Arithmetic of the convolutions; energies are float32 numbers in any case. tf32 and the speed
    of bfloat16 need a GPU."""
    compile: CompileName = "auto"
    """Compile the network with torch.compile; auto does so on a GPU in bfloat16."""
    checkpoint_every: int = 500
    """Updates between checkpoints; the last one and Ctrl-C write one too."""
    threads: int = 1
    """CPU threads of PyTorch: one is fastest for small networks, 0 is PyTorch's own choice."""

    words: ClassVar[tuple[str, ...]] = ("ebmguard", "train", "shortrun")
    shown: ClassVar[tuple[str, ...]] = ("out", "data", "beta_star", "seed")
    may_change: ClassVar[tuple[str, ...]] = (*RunConfig.may_change, "data_root")

    def load_data(self) -> ImageData:
        """The data, on the CPU; read once and kept while the settings ask for the same.

        Raises:
            ConfigError: they are not there, or are not what was published.
        """
        settings = self.settings
        root = self.data_root or os.environ.get(ROOT_VARIABLE)
        return _load_data(
            self.data,
            Path(root) if root else None,
            settings.train_images,
            settings.test_images,
            settings.image_size,
        )

    @property
    def total_steps(self) -> int:
        """Updates that the run is to have."""
        return self.settings.iterations

    @property
    def settings(self) -> Preset:
        """The preset of the data set with what is overridden; K is fixed unless both ends are set.

        Raises:
            ConfigError: there is no such data set.
        """
        if self.data not in PRESETS:
            raise ConfigError(f"data is {self.data!r}, expected one of {', '.join(PRESETS)}")
        names = {field.name for field in dataclasses.fields(Preset)}
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if "sgld_steps" in given:
            given.setdefault("most_sgld_steps", given["sgld_steps"])
        return replace(PRESETS[self.data], **given)

    def check(self, ranks: Ranks = ONE_RANK) -> None:
        """Refuse settings that cannot be meant, or not be divided among the processes.

        Raises:
            ConfigError: names every wrong setting, its value and what was expected; or what the
                data lack.
        """
        settings = self.settings
        wrong = settings.problems()
        problems = [
            f"{name} is {value!r}, expected one of {', '.join(get_args(known))}"
            for name, value, known in (
                ("action", self.action, ActionName),
                ("precision", self.precision, PrecisionName),
                ("compile", self.compile, CompileName),
            )
            if value not in get_args(known)
        ]
        if not math.isfinite(self.beta_star):
            problems.append(
                f"beta_star is {self.beta_star}, expected a finite number, such as 0.02"
            )
        elif not wrong and self.beta_star >= settings.output_scale:
            problems.append(
                f"beta_star is {self.beta_star}, expected less than the output scale, "
                f"{settings.output_scale:g}: f is not in the sampler at it, and upside down beyond"
            )
        if self.most_steps < 1 or self.most_steps & (self.most_steps - 1):
            problems.append(f"most_steps is {self.most_steps}, expected a power of two: 4")
        if self.checkpoint_every < 1:
            problems.append(f"checkpoint_every is {self.checkpoint_every}, expected at least 1")
        if self.threads < 0:
            problems.append(f"threads is {self.threads}, expected 0 or more")
        problems += wrong
        if settings.init == "persistent" and settings.buffer_size < settings.batch:
            problems.append(
                f"buffer_size is {settings.buffer_size}, expected the batch, {settings.batch}, or "
                "more"
            )
        if settings.batch % ranks.world:
            problems.append(
                f"batch is {settings.batch}, expected a multiple of the {ranks.world} processes"
            )
        if problems:
            raise ConfigError("the settings do not make a run:\n  " + "\n  ".join(problems))
        data = self.load_data()
        _, height, width = data.sample_shape
        if height != width:
            raise ConfigError(
                f"{self.data} has images of {height}x{width}, expected square ones: the network "
                "halves both sides together"
            )
        if self.start_from is not None and not self.resume:  # before there is a folder
            start_from(make_network(self, data), Path(self.start_from), settings.activation)

    def resumed(self, stored: Mapping[str, Any]) -> Self:
        """These settings over those of the run that is resumed, or opened to be studied.

        Where a preset has changed since the run began, the run's own value counts.

        Raises:
            ConfigError: names the settings that contradict the run's; or it is no run of this
                trainer.
        """
        was = stored.get("settings", {})
        if "most_sgld_steps" not in was:
            raise ConfigError(f"{self.out} is not a run of `ebmguard {' '.join(self.words[1:])}`")
        config = super().resumed(stored)
        now = config.settings.to_json().items()
        unset = {name: value for name, value in now if getattr(config, name) is None}
        return replace(config, **{k: was[k] for k in unset if was.get(k, unset[k]) != unset[k]})

    def to_json(self) -> dict[str, Any]:
        """The settings and the resolved preset as plain JSON values."""
        return {**super().to_json(), "settings": self.settings.to_json()}


@functools.lru_cache(maxsize=1)
def _load_data(
    name: str, root: Path | None, train: int | None, test: int | None, image_size: int | None
) -> ImageData:
    # The published script trains on every image: none is put aside for a validation.
    return load_data(
        name, root, train_images=train, valid_images=0, test_images=test, image_size=image_size
    )
