"""What the settings of every trainer on images share: data, Langevin chains, arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .device import CompileName, PrecisionName
from .engine.run_config import RunConfig

if TYPE_CHECKING:  # the help needs no torch
    from .data import ImageData


@dataclass(frozen=True)
class DataConfig(RunConfig):
    """Settings of a run on data that may lie in files."""

    data_root: str | None = None
    """Folder of the data sets, else that of the environment variable EBMGUARD_DATA."""
    download: bool = False
    """Fetch the data set from its publisher where it is missing; nothing is fetched without it."""

    may_change: ClassVar[tuple[str, ...]] = (*RunConfig.may_change, "data_root")

    def load_data(self) -> ImageData:
        """What `settings` ask for, on the CPU; read once and kept while they ask for the same."""
        from .data import kept_data

        own: Any = self
        name = getattr(self, "data_name", own.data)
        names = ("train_images", "valid_images", "test_images", "image_size")
        asked = {x: getattr(own.settings, x, getattr(self, x, None)) for x in names}
        return kept_data(name, self.data_root, self.download, **asked)


@dataclass(frozen=True)
class ImageConfig(DataConfig):
    """Settings of one run on images; None is the value of the trainer's scenario or preset."""

    data: str | None = None
    """Data set."""
    beta_star: float = 0.0
    """Exponent of the guard's weights on raw outputs; 0 is the standard trainer."""
    action: str = "warn"
    """What an alert of level ERROR leads to."""
    image_size: int | None = None
    """Pixels a side to which images are averaged down."""
    train_images: int | None = None
    """Training images that are used, to make a run small."""
    test_images: int | None = None
    """Test images that are used."""
    iterations: int | None = None
    """Training steps."""
    lr: float | None = None
    """Learning rate."""
    data_noise: float | None = None
    """Standard deviation of the noise added to the training images."""
    buffer_size: int | None = None
    """Persistent chains, in the replay buffer."""
    sgld_steps: int | None = None
    """Langevin steps per training step."""
    step_size: float | None = None
    """Factor of the gradient in a Langevin step."""
    noise_std: float | None = None
    """Standard deviation of the noise in a Langevin step."""
    precision: PrecisionName = "float32"
    """Arithmetic of the convolutions; energies are float32 numbers in any case. tf32 needs a GPU;
    bfloat16 is faster on one, or on a CPU with AMX."""
    compile: CompileName = "auto"
    """Compile the network with torch.compile; auto does so on a GPU in bfloat16."""

    shown: ClassVar[tuple[str, ...]] = ("out", "data", "beta_star", "seed")

    def problems(self) -> list[str]:
        """What is wrong with the settings above, and with choices among names."""
        problems = super().problems()
        if not math.isfinite(self.beta_star):
            usual = type(self).beta_star
            problems.append(
                f"beta_star is {self.beta_star}, expected a finite number, such as {usual:g}"
            )
        return problems
