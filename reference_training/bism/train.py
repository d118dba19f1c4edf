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
from .annealed import bracket
from .config import BismConfig
from .images import FlatImages
from .matching import sliced
from .methods import Update
from .rbm import MOST_ENUMERATED, GaussianBernoulliRBM

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
    """A Gaussian-Bernoulli RBM, on data of a known density or on images.

    Args:
        config: the settings.
        record: of the run.
    """

    unit = "update"
    lines_every = 1000

    def __init__(self, config: BismConfig, record: Record) -> None:
        self.config, self.record = config, record
        self.title = f"{config.method} on {config.data}"
        device = record.device
        self.distribution = config.open_data(device)
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
        draw = partial(self.distribution.sample, self.config.batch, self.draws.data)
        v = draw()
        numbers = self.update(v, draw if self.config.fresh_inner else None)
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
        rng = torch.Generator(self.record.device).manual_seed(_TEST_SEED)
        data = self.distribution
        draw = data.held_out if isinstance(data, FlatImages) else data.sample
        return draw(self.config.test_samples, rng), rng


train = partial(loop.train, LatentModel)
