"""The trainer of latent-variable models: what a step is; the loop is the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import Tensor

from ..engine import loop
from ..engine.record import Record
from .annealed import bracket
from .config import BismConfig
from .images import FlatImages, open_data
from .matching import sliced
from .methods import Update
from .rbm import MOST_ENUMERATED, GaussianBernoulliRBM
from .watched import TEST_SEED, Chains, WatchedModel, told


class Clock:
    """CPU seconds of the updates and of all, those before a resume included."""

    def __init__(self) -> None:
        self.updates, self._began = 0.0, process_time()

    def whole(self) -> float:
        """Of the run: evaluations, watched chains and the guard included."""
        return process_time() - self._began

    def state_dict(self) -> dict[str, float]:
        """What they are now."""
        return {"updates": self.updates, "whole": self.whole()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what they were."""
        self.updates, self._began = state["updates"], process_time() - state["whole"]


class LatentModel(WatchedModel):
    """A Gaussian-Bernoulli RBM, on data of a known density or on images.

    Args:
        config: the settings.
        record: of the run.
    """

    lines_every = 1000

    def __init__(self, config: BismConfig, record: Record) -> None:
        device, ranks = record.device, record.ranks
        self.config = config
        self.distribution = open_data(config.data, config.data_root, device)
        dim = self.distribution.dim
        super().__init__(config, record, config, dim)
        weights = torch.Generator().manual_seed(config.seed)
        self.model = GaussianBernoulliRBM(dim, config.hidden, weights).to(device)
        self.chains = Chains(torch.zeros(ranks.share(config.batch), dim, device=device))
        self.update = Update(self.model, config, self.draws.update, ranks=ranks)
        self.clock = Clock()
        self.parts = {
            "model": self.model,
            "update": self.update,
            "draws": self.draws,
            "chains": self.chains,
            "clock": self.clock,
        }

    def step(self, step: int) -> Tensor:
        """One update, and a look at the model's samples."""
        draw = partial(self.distribution.sample, self.config.batch, self.draws.data)
        v = draw()
        began = process_time()
        numbers = self.update(v, draw if self.config.fresh_inner else None)
        self.clock.updates += process_time() - began
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
        """How close the model came, of many latents with a bracket of the nats per sample, and how
        much CPU time that took."""
        found = self.measure()
        if self.config.hidden > MOST_ENUMERATED:
            found |= self._bracketed()
        clock = {"update_cpu_seconds": self.clock.updates, "cpu_seconds": self.clock.whole()}
        return found | clock

    def _bracketed(self) -> dict[str, Any]:
        config = self.config
        v, rng = self._held_out()
        start = self.distribution.sample(2 * config.ais_chains, rng)
        sides = bracket(self.model, start, temperatures=config.temperatures, generator=rng)
        with torch.no_grad():
            f = self.model(v).double().mean().item()
        return {
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
run = partial(loop.launch, train, told)
