"""A latent energy-based model by short-run chains, for inference and for synthesis.

So Nijkamp et al. (2019) learn one, as they tell their reviewers: the latents of images by K
Langevin steps in h, the negatives by K in (v, h), and the gradient of the energy between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from ebmguard.samplers import sgld

from ..data import ImageData
from ..engine.record import Record
from ..engine.task import Part
from .deep import DeepEnergy, make_model, pixels
from .deep_config import DeepConfig
from .methods import BETAS
from .watched import TEST_SEED, Chains, WatchedModel

STEP, STD = 0.1, 0.01
"""Of a Langevin step, x += STEP df/dx + STD z; 1, the short runs' own, is too long for squares."""
DATA_STD = 0.03
"""Noise on the images of an update, as short runs have it."""
_BATCH = 250


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


class ShortRunModel(WatchedModel):
    """A deep model whose posterior and whose samples are chains of K steps.

    Cold ones start from noise at every update. Warm, the latents of an image start where they were
    when it was last seen, and the negatives where they came.

    Args:
        config: the settings, of a method with short runs.
        record: of the run.
    """

    def __init__(self, config: DeepConfig, record: Record) -> None:
        self.config, self.settings = config, config.settings
        s, device = self.settings, record.device
        self.data = config.load_data().to(device)
        entries = pixels(self.data, self.data.train_x[:1]).numel()
        super().__init__(record, s, entries=entries, evaluations=config.evaluations)
        self.title = f"{s.method} on {config.data}, latent model"
        self.network = make_model(config, self.data).network
        self.runs = short_runs(config, self.data, self.network, self.draws.chains)
        self.is_warm = s.method.startswith("p")
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=s.lr, betas=BETAS)
        v, h = self.runs.noise(s.batch)
        self.chains, self.latents = Chains(v), Chains(h)
        size = len(self.data.train_x), s.hidden
        self.inferred = Chains(torch.randn(size, generator=self.runs.rng, device=device))
        self.parts: dict[str, Part] = {
            "network": self.network,
            "optimizer": self.optimizer,
            "draws": self.draws,
            "chains": self.chains,
            "latents": self.latents,
            "inferred": self.inferred,
        }

    def step(self, step: int) -> Tensor:
        """One update by the difference of the energies, which the guard has too."""
        rng, images = self.draws.data, self.data.train_x
        rows = torch.randperm(len(images), generator=rng, device=rng.device)[: self.settings.batch]
        v = pixels(self.data, images[rows])
        v = v + DATA_STD * torch.randn(v.shape, generator=rng, device=rng.device)
        if self.is_warm:
            h, starts = self.inferred.v[rows], (self.chains.v, self.latents.v)
        else:
            (_, h), starts = self.runs.noise(len(v)), self.runs.noise(len(v))
        self.inferred.v[rows] = h = self.runs.infer(v, h)
        self.chains.v, self.latents.v = self.runs.synthesize(*starts)
        energy = self.network.energy
        f_pos, f_neg = -energy(v, h), -energy(self.chains.v, self.latents.v)
        loss = self.loss_fn(f_pos, f_neg)
        self.optimizer.param_groups[0]["lr"] = self.settings.rate(step) * self.settings.lr
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self.chains.v

    def measure(self) -> dict[str, float]:
        """Mean squared error of a pixel of reconstructed test images, always of the same noise."""
        rng = torch.Generator(self.record.device).manual_seed(TEST_SEED)
        return {
            "reconstruction_error": reconstruction_error(replace(self.runs, rng=rng), self.data)
        }

    def results(self) -> dict[str, Any]:
        """How well it reconstructs."""
        return self.measure()


def short_runs(
    config: DeepConfig, data: ImageData, network: DeepEnergy, rng: Generator
) -> ShortRuns:
    """The chains that a method names: cold srK, warm psrK."""
    shape = pixels(data, data.train_x[:1]).shape[1:]
    return ShortRuns(network, shape, int(config.settings.method.rpartition("sr")[2]), rng)


def reconstruction_error(runs: ShortRuns, data: ImageData) -> float:
    """Mean squared error of a pixel, over the test images; an image is in [0, 1]."""
    total = 0.0
    for part in torch.split(data.test_x, _BATCH):
        v = pixels(data, part)
        total += (runs.given(runs.latents(v)) - v).square().mean().item() * len(v)
    return total / len(data.test_x)
