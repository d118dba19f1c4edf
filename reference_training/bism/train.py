"""The trainer of latent-variable models: what a step is; the loop is the engine's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebmguard import guard

from ..engine import loop
from ..engine.record import Record
from ..engine.streams import Streams
from ..engine.task import Step, Task
from .config import DATA, BismConfig
from .matching import sliced
from .methods import Update
from .rbm import GaussianBernoulliRBM

EVALUATIONS = "evaluations.jsonl"
_TEST_SEED = 0xB15


class Draws(Streams):
    """Random numbers of the data, of the updates and of the watched chains."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.data, self.update, self.chains = (
            torch.Generator(device).manual_seed(3 * seed + i) for i in range(3)
        )
        super().__init__({"data": self.data, "update": self.update, "chains": self.chains})


class Chains:
    """Gibbs chains of the model as it trains.

    Attributes:
        v: where they stand, ``(count, visible)``.
    """

    def __init__(self, v: Tensor) -> None:
        self.v = v

    def state_dict(self) -> Tensor:
        """Where they stand."""
        return self.v

    def load_state_dict(self, state: Tensor) -> None:
        """Go back to a saved state."""
        self.v = state


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
        self.draws = Draws(config.seed, device)
        self.chains = Chains(torch.zeros(config.batch, dim, device=device))
        self.update = Update(self.model, config.update, self.draws.update)
        # It watches: the energies that it gets are no part of the loss, and no sampler is tempered.
        self.loss_fn, _ = guard(None, None, beta_star=0.0, output_scale=1.0, **record.for_guard)
        self.guards = {"guard": self.loss_fn.guard}
        self.parts = {
            "model": self.model,
            "update": self.update,
            "draws": self.draws,
            "chains": self.chains,
        }

    def step(self, step: int) -> Step:
        """One update, and a look at the model's samples."""
        v = self.distribution.sample(self.config.batch, self.draws.data)
        numbers = self.update(v)
        samples = self.model.gibbs(self.chains.v, self.config.gibbs_steps, self.draws.chains)
        self.chains.v = samples
        with torch.no_grad():
            f_pos, f_neg = self.model(v), self.model(samples)
            self.loss_fn(f_pos, f_neg)
        return Step({**numbers, "energy_gap": f_pos.mean() - f_neg.mean()}, samples)

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
