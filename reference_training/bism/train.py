"""The trainer of latent-variable models: what a step is; the loop is the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebmguard import guard

from ..engine import loop
from ..engine.record import Record
from ..engine.task import Step, Task
from .config import DATA, BismConfig
from .matching import sliced
from .methods import Update
from .rbm import GaussianBernoulliRBM

EVALUATIONS = "evaluations.jsonl"
_TEST_SEED = 0xB15


class Streams:
    """Random numbers of the data, of the updates and of the watched chains, and these chains."""

    def __init__(self, seed: int, chains: Tensor) -> None:
        self.data, self.update, self.gibbs = (
            torch.Generator(chains.device).manual_seed(3 * seed + i) for i in range(3)
        )
        self.chains = chains

    def state_dict(self) -> dict[str, Any]:
        """Where each stands."""
        streams = {name: getattr(self, name).get_state() for name in ("data", "update", "gibbs")}
        return {**streams, "chains": self.chains}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        for name in ("data", "update", "gibbs"):
            getattr(self, name).set_state(state[name].cpu())
        self.chains = state["chains"]


class LatentModel(Task):
    """A Gaussian-Bernoulli RBM on data of a known density.

    Args:
        config: the settings.
        record: of the run.
    """

    unit = "update"
    lines_every = 1000

    def __init__(self, config: BismConfig, record: Record) -> None:
        self.config, self.record = config, record
        self.title = f"{config.method} on {config.data}"
        self.distribution, device = DATA[config.data], record.device
        weights = torch.Generator().manual_seed(config.seed)
        dim = self.distribution.dim
        self.model = GaussianBernoulliRBM(dim, config.hidden, weights).to(device)
        self.streams = Streams(config.seed, torch.zeros(config.batch, dim, device=device))
        self.update = Update(self.model, config.update, self.streams.update)
        # It watches: the energies that it gets are no part of the loss, and no sampler is tempered.
        self.loss_fn, _ = guard(None, None, beta_star=0.0, output_scale=1.0, **record.for_guard)
        self.guards = {"guard": self.loss_fn.guard}
        self.parts = {"model": self.model, "update": self.update, "streams": self.streams}

    def step(self, step: int) -> Step:
        """One update, and a look at the model's samples."""
        v = self.distribution.sample(self.config.batch, self.streams.data)
        numbers = self.update(v)
        streams = self.streams
        streams.chains = self.model.gibbs(streams.chains, self.config.gibbs_steps, streams.gibbs)
        with torch.no_grad():
            f_pos, f_neg = self.model(v), self.model(streams.chains)
            self.loss_fn(f_pos, f_neg)
        gap = f_pos.mean() - f_neg.mean()
        return Step({**numbers, "energy_gap": gap}, streams.chains)

    def evaluate(self, step: int) -> bool:
        """Measure the model where that is due."""
        config = self.config
        due = [done * config.evaluations // config.iterations for done in (step - 1, step)]
        if due[1] > due[0]:
            self.record.folder.append_rows(EVALUATIONS, [{"step": step, **self.measure()}])
        return due[1] > due[0]

    def measure(self) -> dict[str, float]:
        """Nats per held-out sample, exactly, and the sliced Fisher divergence."""
        rng = torch.Generator(self.record.device).manual_seed(_TEST_SEED)
        v = self.distribution.sample(self.config.test_samples, rng)
        directions = torch.randn(v.shape, generator=rng, device=v.device).sign()
        with torch.no_grad():
            log_likelihood = (self.model(v) - self.model.log_z()).mean()
            data = self.distribution.log_density(v).mean()
        return {
            "log_likelihood": log_likelihood.item(),
            "kl": (data - log_likelihood).item(),
            "fisher": sliced(self.model, v, directions).mean().item(),
        }

    def results(self) -> dict[str, Any]:
        """How close the model came."""
        return self.measure()


train = partial(loop.train, LatentModel)
