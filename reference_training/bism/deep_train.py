"""The trainer of deep latent-variable models of images: what a step is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from ebmguard.samplers import sgld

from ..data import ImageData
from ..engine import loop
from ..engine.record import Record
from .bilevel import BETAS
from .config import DeepConfig
from .deep import DeepEnergy, DeepModel, make_model, pixels
from .methods import Update
from .train import TEST_SEED, Chains, WatchedModel, told

STD = 0.02
"""Noise of a Langevin step, as published; it goes STD^2 / 2 along the score."""
SHORT_STEP, SHORT_STD, DATA_STD = 0.1, 0.01, 0.03
"""Of short runs: x += SHORT_STEP df/dx + SHORT_STD z, and the noise on the images of an update; the
published SHORT_STEP, 1, is too long for squares."""
BATCH = 250
"""Test images that pass together."""


class ImageModel(WatchedModel):
    """A deep energy-based model of images."""

    def __init__(self, config: DeepConfig, record: Record) -> None:
        self.config, self.data = config, config.load_data().to(record.device)
        entries = pixels(self.data, self.data.train_x[:1]).numel()
        super().__init__(config, record, config.settings, entries)
        self.title += f", {config.model} model"
        self.model = make_model(config, self.data)


class DeepLatentModel(ImageModel):
    """A model with a posterior, or fully visible; its chains begin at images."""

    def __init__(self, config: DeepConfig, record: Record) -> None:
        super().__init__(config, record)
        draws, (network, posterior) = self.draws, (self.model.network, self.model.posterior)
        self.walk, self.between = partial(walk, self.model), config.langevin_steps
        self.log_density = partial(self.model.log_density, draws.chains)
        self.chains = Chains(self.seen(self.minibatch(draws.chains)))
        self.update = Update(
            network, self.settings, draws.update, posterior, self.walk, record.ranks
        )
        self.parts |= {"network": network, "update": self.update, "chains": self.chains}

    def minibatch(self, rng: Generator) -> Tensor:
        """Of training images."""
        rows = (self.config.settings.batch,)
        chosen = torch.randint(len(self.data.train_x), rows, generator=rng, device=rng.device)
        return pixels(self.data, self.data.train_x[chosen])

    def measure(self) -> dict[str, float]:
        """The loss of test images at noise and latents that are the same in every evaluation."""
        rng = torch.Generator(self.record.device).manual_seed(TEST_SEED)
        loss, test = 0.0, self.data.test_x
        for part in torch.split(test, BATCH):  # each has every noise of the range
            loss += self.update.held_out(pixels(self.data, part), rng) * len(part) / len(test)
        return {"test_loss": loss}


def walk(model: DeepModel, v: Tensor, steps: int, rng: Generator) -> Tensor:
    """Langevin steps of chains in v; each draws h anew, where there is a posterior."""
    f = model.log_density(rng)
    return sgld(f, v, steps=steps, step_size=STD**2 / 2, noise_std=STD, generator=rng)


@dataclass(frozen=True)
class ShortRuns:
    """Chains of K steps of a deep model with real latents, where v has the shape (C, H, W).

    So Nijkamp et al. (2019) learn one, as they tell their reviewers: the latents of images by K
    Langevin steps in h, the negatives by K in (v, h), and the gradient of the energy between them.
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
        return sgld(
            f, x, steps=self.steps, step_size=SHORT_STEP, noise_std=SHORT_STD, generator=self.rng
        )


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


class ShortRunModel(ImageModel):
    """A model whose posterior and whose samples are chains of K steps.

    Cold ones start from noise at every update. Warm, the latents of an image start where they were
    when it was last seen, and the negatives where they came.
    """

    def __init__(self, config: DeepConfig, record: Record) -> None:
        super().__init__(config, record)
        s, self.network = config.settings, self.model.network
        self.runs = short_runs(config, self.data, self.network, self.draws.chains)
        self.is_warm = s.method.startswith("p")
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=s.lr, betas=BETAS)
        v, h = self.runs.noise(s.batch)
        self.chains, self.latents = Chains(v), Chains(h)
        size = len(self.data.train_x), s.hidden
        self.inferred = Chains(torch.randn(size, generator=self.runs.rng, device=record.device))
        self.parts |= {"network": self.network, "optimizer": self.optimizer}
        self.parts |= {"chains": self.chains, "latents": self.latents, "inferred": self.inferred}

    def step(self, step: int) -> Tensor:
        """One update by the difference of the energies, which the guard has too."""
        rng, images, s = self.draws.data, self.data.train_x, self.config.settings
        rows = torch.randperm(len(images), generator=rng, device=rng.device)[: s.batch]
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
        self.optimizer.param_groups[0]["lr"] = s.rate(step) * s.lr
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self.chains.v

    def measure(self) -> dict[str, float]:
        """Mean squared error of a pixel of reconstructed test images, always of the same noise."""
        rng = torch.Generator(self.record.device).manual_seed(TEST_SEED)
        error = reconstruction_error(replace(self.runs, rng=rng), self.data)
        return {"reconstruction_error": error}


def build(config: DeepConfig, record: Record) -> ImageModel:
    """The task that the method asks for."""
    kinds: tuple[Callable[[DeepConfig, Record], ImageModel], ...] = DeepLatentModel, ShortRunModel
    return kinds[config.is_short_run](config, record)


train = partial(loop.train, build)
run = partial(loop.launch, train, told)
