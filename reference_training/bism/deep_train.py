"""The trainer of deep latent-variable models of images: what a step is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from ebmguard.samplers import sgld

from ..engine import loop
from ..engine.launch import launch
from ..engine.record import Record
from ..engine.task import Part
from .deep import make_model, pixels
from .deep_config import DeepConfig
from .methods import Update
from .short_run import ShortRunModel
from .watched import TEST_SEED, Chains, WatchedModel, told

STD = 0.02
"""Noise of a Langevin step, as published; it goes STD^2 / 2 along the score."""
_TEST_BATCH = 250


class DeepLatentModel(WatchedModel):
    """A deep energy-based model of images, with latents or fully visible.

    Args:
        config: the settings.
        record: of the run.
    """

    def __init__(self, config: DeepConfig, record: Record) -> None:
        self.config, self.settings = config, config.settings
        s = self.settings
        self.data = config.load_data().to(record.device)
        entries = pixels(self.data, self.data.train_x[:1]).numel()
        super().__init__(record, s, entries=entries, evaluations=config.evaluations)
        self.title = f"{s.method} on {config.data}, {config.model} model"
        self.model = make_model(config, self.data)
        self.chains = Chains(self._seen(self._images(self.draws.chains)))
        network, posterior = self.model.network, self.model.posterior
        self.update = Update(network, s, self.draws.update, posterior, self._walk, record.ranks)
        self.parts: dict[str, Part] = {
            "network": self.model.network,
            "update": self.update,
            "draws": self.draws,
            "chains": self.chains,
        }

    def step(self, step: int) -> Tensor:
        """One update, and a look at chains of the model, which began at images."""
        v, chains = self._images(self.draws.data), self.draws.chains
        numbers = self.update(v, rate=self.settings.rate(step))
        samples = self._walk(self.chains.v, self.config.langevin_steps, chains)
        return self._watch(self.model.log_density(chains), v, samples, numbers)

    def measure(self) -> dict[str, float]:
        """The loss of test images at noise and latents that are the same in every evaluation."""
        rng = torch.Generator(self.record.device).manual_seed(TEST_SEED)
        loss, test = 0.0, self.data.test_x
        for part in torch.split(test, _TEST_BATCH):  # each has every noise of the range
            loss += self.update.held_out(pixels(self.data, part), rng) * len(part) / len(test)
        return {"test_loss": loss}

    def results(self) -> dict[str, Any]:
        """How the model does on test images."""
        return self.measure()

    def _walk(self, v: Tensor, steps: int, rng: Generator) -> Tensor:
        f = self.model.log_density(rng)
        return sgld(f, v, steps=steps, step_size=STD**2 / 2, noise_std=STD, generator=rng)

    def _images(self, rng: Generator) -> Tensor:
        rows = (self.settings.batch,)
        chosen = torch.randint(len(self.data.train_x), rows, generator=rng, device=rng.device)
        return pixels(self.data, self.data.train_x[chosen])


def build(config: DeepConfig, record: Record) -> WatchedModel:
    """The task that the method asks for."""
    kinds: tuple[Callable[[DeepConfig, Record], WatchedModel], ...] = DeepLatentModel, ShortRunModel
    return kinds[config.is_short_run](config, record)


train = partial(loop.train, build)
run = partial(launch, train, told)
