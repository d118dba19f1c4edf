"""A trained short-run model, opened to be studied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..data import ImageData
from ..engine.checkpoints import load_all_ranks
from ..engine.run_folder import read_config
from .config import Preset, ShortRunConfig
from .network import EnergyNet
from .sampler import chain, refined, uniform

BATCH = 500
"""Images whose energies are computed together."""
CHUNK = 100
"""Steps of a chain whose noise is drawn together."""


@dataclass(frozen=True)
class TrainedRun:
    """A model, in evaluation mode and without gradients of its parameters, and how it was trained.

    The data are on its device; `step` is the number of updates that it was trained for.
    """

    path: Path
    config: ShortRunConfig
    network: EnergyNet
    data: ImageData
    step: int

    @property
    def settings(self) -> Preset:
        """The preset with what the run overrides."""
        return self.config.settings

    @property
    def device(self) -> torch.device:
        """Where network and data are."""
        return self.data.train_x.device

    @property
    def name(self) -> str:
        """A label for pictures and tables: the name of the run folder."""
        return self.path.name

    @property
    def drift(self) -> float:
        """1 - β, the factor on f in the sampler of the training."""
        return 1 - self.config.beta_star / self.settings.output_scale

    @property
    def step_size(self) -> float:
        """Factor of ∇f in a step of the training's sampler, which runs on (1 - β) f."""
        return self.settings.step_size * self.drift

    def starts(self, count: int, generator: torch.Generator) -> Tensor:
        """Start points of chains, U(-1, 1): (count, C, H, W)."""
        return uniform((count, *self.data.sample_shape), generator)

    def chains(
        self, x0: Tensor, steps: int, generator: torch.Generator, *, step_factor: float = 1.0
    ) -> Tensor:
        """Langevin steps as in the training, on (1 - β) f: (n, C, H, W), detached.

        Args:
            x0: where they start, (n, C, H, W).
            steps: how many.
            generator: of the noise, on the device of `x0`.
            step_factor: factor on α, the step of the Langevin equation: that on the drift, and the
                square of that on the noise.
        """
        settings = refined(self.settings, 1 / step_factor)
        # The noise is not tempered, only the drift.
        settings = replace(settings, step_size=settings.step_size * self.drift)
        x = x0
        for done in range(0, steps, CHUNK):
            count = min(CHUNK, steps - done)
            noise = torch.randn((count, *x0.shape), generator=generator, device=x0.device)
            x = chain(settings, self.network, x, noise)
        return x

    def energies(self, x: Tensor) -> Tensor:
        """f of images (N, C, H, W) in [-1, 1]: (N,)."""
        with torch.no_grad():
            return torch.cat([self.network(part) for part in torch.split(x, BATCH)])


def load_run(path: Path, device: torch.device, data_root: str | None = None) -> TrainedRun:
    """Open the run folder of `ebmguard train shortrun`, finished or not.

    The folder of the data sets is named where it is another than in the training.
    """
    stored = read_config(path)
    config = ShortRunConfig(out=path, resume=True, data_root=data_root).resumed(stored)
    step, (first, *_) = load_all_ranks(path / "checkpoints")
    data = config.load_data().to(device)
    network = config.make_network(data)
    network.load_state_dict(first["network"])
    return TrainedRun(path, config, network.eval().requires_grad_(False), data, step)
