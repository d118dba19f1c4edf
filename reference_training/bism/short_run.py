"""A latent energy-based model by short-run chains, for inference and for synthesis.

So Nijkamp et al. (2019) learn one, as they tell their reviewers: the latents of images by K
Langevin steps in h, the negatives by K in (v, h), and the gradient of the energy between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from ebmguard.samplers import sgld

from ..data import ImageData
from .config import DeepConfig
from .deep import DeepEnergy, pixels

STEP, STD = 0.1, 0.01
"""Of a Langevin step, x += STEP df/dx + STD z; 1, the short runs' own, is too long for squares."""
BATCH = 250
"""Test images that pass together."""


@dataclass(frozen=True)
class ShortRuns:
    """Chains of K steps of a deep model with real latents.

    Attributes:
        network: E(v, h).
        shape: (C, H, W) of v.
        steps: K.
        rng: of all noise.
    """

    network: DeepEnergy
    shape: tuple[int, ...]
    steps: int
    rng: Generator

    def noise(self, count: int) -> tuple[Tensor, Tensor]:
        """Where cold chains start: uniform v, ``(count, C, H, W)``, and normal h, in this order."""
        options: dict[str, Any] = {"generator": self.rng, "device": self.rng.device}
        v = torch.rand(count, *self.shape, **options)
        return v, torch.randn(count, self.network.hidden, **options)

    def infer(self, v: Tensor, h: Tensor) -> Tensor:
        """h after K steps at a fixed v."""
        with torch.no_grad():
            projected = self.network.projected(v)
        return self._walk(lambda h: -self.network.of_projected(projected, h), h)

    def synthesize(self, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Both after K steps."""

        def parts(x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, : -h.shape[1]].view(v.shape), x[:, -h.shape[1] :]

        joint = torch.cat((v.flatten(1), h), 1)
        return parts(self._walk(lambda x: -self.network.energy(*parts(x)), joint))

    def latents(self, v: Tensor) -> Tensor:
        """Of images, by cold chains."""
        return self.infer(v, self.noise(len(v))[1])

    def given(self, h: Tensor) -> Tensor:
        """Images of latents, by cold chains."""
        return self._walk(lambda v: -self.network.energy(v, h), self.noise(len(h))[0])

    def samples(self, count: int) -> Tensor:
        """Images by cold chains in (v, h)."""
        return self.synthesize(*self.noise(count))[0]

    def _walk(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return sgld(f, x, steps=self.steps, step_size=STEP, noise_std=STD, generator=self.rng)


def short_runs(
    config: DeepConfig, data: ImageData, network: DeepEnergy, rng: Generator
) -> ShortRuns:
    """The chains that a method names: cold srK, warm psrK."""
    shape = pixels(data, data.train_x[:1]).shape[1:]
    return ShortRuns(network, shape, int(config.settings.method.rpartition("sr")[2]), rng)


def reconstruction_error(runs: ShortRuns, data: ImageData) -> float:
    """Mean squared error of a pixel, over the test images; an image is in [0, 1]."""
    total = 0.0
    for part in torch.split(data.test_x, BATCH):
        v = pixels(data, part)
        total += (runs.given(runs.latents(v)) - v).square().mean().item() * len(v)
    return total / len(data.test_x)
