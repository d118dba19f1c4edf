"""The trainer of latent-variable models: what a step is; the loop is the engine's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine import loop
from ..engine.record import Record
from ..engine.task import Step
from .annealed import bracket
from .config import BismConfig
from .images import FlatImages
from .matching import sliced
from .methods import Update
from .rbm import MOST_ENUMERATED, GaussianBernoulliRBM
from .watched import TEST_SEED, Chains, WatchedModel


class LatentModel(WatchedModel):
    """A Gaussian-Bernoulli RBM, on data of a known density or on images.

    Args:
        config: the settings.
        record: of the run.
    """

    lines_every = 1000

    def __init__(self, config: BismConfig, record: Record) -> None:
        super().__init__(
            record,
            seed=config.seed,
            iterations=config.iterations,
            evaluations=config.evaluations,
        )
        self.config = config
        self.title = f"{config.method} on {config.data}"
        device = record.device
        self.distribution = config.open_data(device)
        weights = torch.Generator().manual_seed(config.seed)
        dim = self.distribution.dim
        self.model = GaussianBernoulliRBM(dim, config.hidden, weights).to(device)
        self.chains = Chains(torch.zeros(config.batch, dim, device=device))
        self.update = Update(self.model, config.update, self.draws.update)
        self.parts = {
            "model": self.model,
            "update": self.update,
            "draws": self.draws,
            "chains": self.chains,
        }

    def step(self, step: int) -> Step:
        """One update, and a look at the model's samples."""
        draw = partial(self.distribution.sample, self.config.batch, self.draws.data)
        v = draw()
        numbers = self.update(v, draw if self.config.fresh_inner else None)
        samples = self.model.gibbs(self.chains.v, self.config.gibbs_steps, self.draws.chains)
        return self._watch(self.model, v, samples, numbers)

    def measure(self) -> dict[str, Any]:
        """The sliced Fisher divergence; of few latents nats per held-out sample too, exactly.

        The KL is that to the data, where their density is known.
        """
        v, rng = self._held_out()
        directions = torch.randn(v.shape, generator=rng, device=v.device).sign()
        found = {"fisher": sliced(self.model, v, directions).mean().item()}
        if self.config.hidden > MOST_ENUMERATED:
            return found
        with torch.no_grad():
            log_likelihood = (self.model(v) - self.model.log_z()).mean()
        found["log_likelihood"] = log_likelihood.item()
        if not isinstance(self.distribution, FlatImages):
            data = self.distribution.log_density(v).mean()
            found["kl"] = (data - log_likelihood).item()
        return found

    def results(self) -> dict[str, Any]:
        """How close the model came; of many latents with a bracket of the nats per sample."""
        found, config = self.measure(), self.config
        if config.hidden <= MOST_ENUMERATED:
            return found
        v, rng = self._held_out()
        start = self.distribution.sample(2 * config.ais_chains, rng)
        sides = bracket(self.model, start, temperatures=config.temperatures, generator=rng)
        with torch.no_grad():
            f = self.model(v).double().mean().item()
        return {
            **found,
            "log_likelihood_low": f - sides.upper,
            "log_likelihood_high": f - sides.lower,
            "bracket_holds": not sides.problems,
            "verdict": sides.verdict,
        }

    def _held_out(self) -> tuple[Tensor, torch.Generator]:
        rng = torch.Generator(self.record.device).manual_seed(TEST_SEED)
        data = self.distribution
        draw = data.held_out if isinstance(data, FlatImages) else data.sample
        return draw(self.config.test_samples, rng), rng


train = partial(loop.train, LatentModel)
