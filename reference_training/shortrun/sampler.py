"""What is random in an update, and the short-run sampler: Langevin steps from noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ebmguard.samplers import random_steps, sgld

from ..data import ImageData
from ..engine.graphs import graphed
from ..engine.ranks import Ranks
from ..engine.task import Streams
from ..networks import frozen
from .config import Preset

Sampler = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A function of the network, start points (n, C, H, W) and standard normal noise
(steps, n, C, H, W) that returns detached samples (n, C, H, W)."""


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


def chain(settings: Preset, network: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
    """Langevin steps, as many as there is noise for (Nijkamp et al. 2019, Eq. 4).

    x += step_size * df/dx + noise_std * z, without a clamp: chains may leave the cube. Shapes are
    those of a :data:`Sampler`.
    """
    step_size, noise_std = settings.step_size, settings.noise_std
    # A compiled network would compute the parameters' gradients along with the samples'.
    with frozen(network) as f:
        return sgld(f, x0, steps=len(noise), step_size=step_size, noise_std=noise_std, noise=noise)


def make_sampler(settings: Preset, device: torch.device) -> Sampler:
    """The chains of the training; on a GPU as CUDA graphs.

    A fixed number of steps is one graph. Of a random number the steps that every chain has, all but
    one, are a graph, and the others a graph of one step, replayed as often as is needed: with a
    graph for each number there would be as many graphs as numbers. The guard reads the gradient
    norm of the graph that was captured last, and so that graph has to be a part of every chain.

    Args:
        settings: of the chains.
        device: where they run.

    Returns:
        a sampler that belongs to one network and one guard: what a graph has captured is theirs.
    """
    climb = graphed(partial(chain, settings), device)
    is_fixed = settings.sgld_steps == settings.most_sgld_steps
    common = settings.sgld_steps - (0 if is_fixed else 1)

    def sample_q(network: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
        x = climb(network, x0, noise[:common]) if common else x0
        for step in range(common, len(noise)):
            x = climb(network, x, noise[step : step + 1])
        return x.clone()  # a graph overwrites its result in the next call

    return sample_q


def refined(settings: Preset, finer: float) -> Preset:
    """The settings with steps that are so much finer; 1 / 4 for an α that is four times as large.

    α, the step of the Langevin equation, is noise_std**2, and proportional to step_size.
    """
    step_size, noise_std = settings.step_size / finer, settings.noise_std / finer**0.5
    return replace(settings, step_size=step_size, noise_std=noise_std)
