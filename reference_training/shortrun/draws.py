"""What is random in an update: images, start points, noise, and the number of Langevin steps."""

from __future__ import annotations

import torch
from torch import Tensor

from ebmguard.samplers import random_steps

from ..data import ImageData
from ..engine.ranks import Ranks
from ..engine.streams import Streams
from .config import Preset


class Draws(Streams):
    """Random numbers of a run, in three streams, so that runs of different β* differ in it alone.

    Every rank draws the same images and the same number of steps, and keeps its part of the
    images; the noise of its chains is its own. All are on the device of the data.
    """

    def __init__(self, data: ImageData, settings: Preset, seed: int, ranks: Ranks) -> None:
        device = data.train_x.device
        self._data, self._settings, self._ranks = data, settings, ranks
        self.images = torch.Generator(device).manual_seed(3 * seed)
        self.chains = torch.Generator(device).manual_seed(ranks.own_seed(3 * seed + 1))
        # Counts are needed on the host: one on a GPU would have to be waited for.
        self._counts = torch.Generator().manual_seed(3 * seed + 2)
        super().__init__({"images": self.images, "chains": self.chains, "counts": self._counts})

    def positives(self) -> Tensor:
        """This rank's noisy images of an update, with replacement: (n, C, H, W)."""
        data, settings, rng = self._data, self._settings, self.images
        size = (settings.batch,)
        rows = torch.randint(len(data.train_x), size, generator=rng, device=rng.device)
        x = data.scale(data.train_x[rows])
        noise = torch.randn(x.shape, generator=rng, device=x.device)
        return (x + settings.data_noise * noise)[self._ranks.part(settings.batch)]

    def starts(self, count: int) -> Tensor:
        """Start points of chains, U(-1, 1): (count, C, H, W)."""
        return uniform((count, *self._data.sample_shape), self.chains)

    def noise(self, count: int, steps: int) -> Tensor:
        """Standard normal noise of chains: (steps, count, C, H, W)."""
        shape = (steps, count, *self._data.sample_shape)
        return torch.randn(shape, generator=self.chains, device=self.chains.device)

    def sgld_steps(self) -> int:
        """K of an update, the same on every rank."""
        settings = self._settings
        if settings.sgld_steps == settings.most_sgld_steps:
            return settings.sgld_steps
        return random_steps(settings.sgld_steps, settings.most_sgld_steps, self._counts)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """U(-1, 1), where short-run chains start, on the generator's device."""
    return 2 * torch.rand(shape, generator=generator, device=generator.device) - 1
