"""The trainer of latent-variable models: what a step is; the loop is the engine's."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import Generator, Tensor

from ebmguard import guard

from ..engine import loop
from ..engine.record import Record
from ..engine.task import Part, Streams, Task
from .annealed import bracket
from .config import BismConfig, DeepConfig, UpdateSettings
from .images import FlatImages, open_data
from .matching import LogDensity, sliced
from .methods import Update, Walk
from .rbm import MOST_ENUMERATED, GaussianBernoulliRBM

EVALUATIONS = "evaluations.jsonl"
TEST_SEED = 0xB15
"""Of what every evaluation draws: the same each time."""


class Draws(Streams):
    """Random numbers of the data, of the updates and of the watched chains.

    Every rank draws the same minibatches and the same numbers of an update, and keeps its part of
    them. Those of chains are its own, as those of updates are if they are of chains alone.
    """

    def __init__(self, record: Record, chains_alone: bool) -> None:
        seed, own = 3 * record.config.seed, record.ranks.own_seed
        seeds = seed, own(seed + 1) if chains_alone else seed + 1, own(seed + 2)
        streams = [torch.Generator(record.device).manual_seed(each) for each in seeds]
        self.data, self.update, self.chains = streams
        super().__init__(dict(zip(("data", "update", "chains"), streams, strict=True)))


class Chains:
    """Where chains of the model stand as it trains, ``(count, ...)``."""

    def __init__(self, v: Tensor) -> None:
        self.v = v

    def state_dict(self) -> Tensor:
        """For a checkpoint."""
        return self.v

    def load_state_dict(self, state: Tensor) -> None:
        """Go back to a saved state."""
        self.v = state


class Clock:
    """CPU seconds of the updates and of all, those before a resume included."""

    def __init__(self) -> None:
        self.updates, self._began = 0.0, process_time()

    def state_dict(self) -> dict[str, float]:
        """What they are now; of all, evaluations, watched chains and the guard are a part."""
        return {"updates": self.updates, "whole": process_time() - self._began}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what they were."""
        self.updates, self._began = state["updates"], process_time() - state["whole"]


class WatchedModel(Task):
    """A model that trains by a loss of its own, with chains of it that the guard watches.

    Args:
        config, record: of the run.
        settings: of its updates.
        entries: of a sample.

    Attributes:
        chains: those that are watched.
        update: trains the model on a minibatch.
        minibatch: draws one, that of all ranks.
        walk: moves chains.
        between: by how many steps between updates.
        log_density: gives what stands for f in what the guard sees.
    """

    unit = "update"
    chains: Chains
    update: Update
    minibatch: Callable[[Generator], Tensor]
    walk: Walk
    between: int
    log_density: Callable[[], LogDensity]

    def __init__(
        self,
        config: BismConfig | DeepConfig,
        record: Record,
        settings: UpdateSettings,
        entries: int,
    ) -> None:
        self.record, self.settings = record, settings
        self.title = f"{settings.method} on {config.data}"
        self.draws, self.clock = Draws(record, settings.has_chains), Clock()
        self.parts: dict[str, Part] = {"draws": self.draws}
        self._evaluations = config.evaluations
        # The energies that it gets are no part of the loss, and no sampler is tempered. Of exact
        # samples f has a spread of about (entries / 2)^0.5: at an exponent of 1/2 a few of many
        # entries would carry all weight, though nothing is wrong with them.
        weaker = (2 * entries) ** -0.5
        strength = {"beta_star": 0.0, "output_scale": 1.0, "reference_beta_star": weaker}
        self.loss_fn, _ = guard(None, None, **strength, **record.for_guard)
        self.guards = {"guard": self.loss_fn.guard}

    @abc.abstractmethod
    def measure(self) -> dict[str, Any]:
        """What an evaluation finds, by name."""

    def step(self, step: int) -> Tensor:
        """One update, and a look at chains of the model."""
        draw = partial(self.minibatch, self.draws.data)
        v = draw()
        began = process_time()
        inner = draw if self.settings.fresh_inner else None
        numbers = self.update(v, inner, rate=self.settings.rate(step))
        self.clock.updates += process_time() - began
        self.chains.v = samples = self.walk(self.chains.v, self.between, self.draws.chains)
        f, v = self.log_density(), self.seen(v)
        with torch.no_grad():
            energies = f(v), f(samples)
        self.loss_fn(*energies)  # which leaves no trace where gradients are off
        self.loss_fn.guard.log(self.record.ranks.means(numbers))
        return samples

    def evaluate(self, step: int) -> bool:
        """Measure the model where that is due, the last time at the end."""
        total = self.record.config.total_steps
        before, now = (done * self._evaluations // total for done in (step - 1, step))
        if now > before:
            self.record.folder.append_rows(EVALUATIONS, [{"step": step, **self.measure()}])
        return now > before

    def results(self) -> dict[str, Any]:
        """How the model does at the end."""
        return self.measure()

    def seen(self, v: Tensor) -> Tensor:
        """This rank's part of a minibatch, with the noise of the data that the model learns."""
        v, held = v[self.record.ranks.part(len(v))], self.settings.held
        if not held:
            return v
        return v + held * torch.randn(v.shape, generator=self.draws.chains, device=v.device)


class LatentModel(WatchedModel):
    """A Gaussian-Bernoulli RBM, on data of a known density or on images."""

    lines_every = 1000

    def __init__(self, config: BismConfig, record: Record) -> None:
        device, ranks = record.device, record.ranks
        self.config = config
        self.distribution = open_data(config.data, config.data_root, device)
        dim = self.distribution.dim
        super().__init__(config, record, config, dim)
        weights = torch.Generator().manual_seed(config.seed)
        self.model = GaussianBernoulliRBM(dim, config.hidden, weights).to(device)
        self.minibatch = partial(self.distribution.sample, config.batch)
        self.walk, self.between = self.model.gibbs, config.gibbs_steps
        self.log_density = lambda: self.model
        self.chains = Chains(torch.zeros(ranks.share(config.batch), dim, device=device))
        self.update = Update(self.model, config, self.draws.update, ranks=ranks)
        self.parts |= {"model": self.model, "update": self.update}
        self.parts |= {"chains": self.chains, "clock": self.clock}

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
        clock = self.clock.state_dict()
        return found | {"update_cpu_seconds": clock["updates"], "cpu_seconds": clock["whole"]}

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

    def _held_out(self) -> tuple[Tensor, Generator]:
        rng = torch.Generator(self.record.device).manual_seed(TEST_SEED)
        data = self.distribution
        draw = data.held_out if isinstance(data, FlatImages) else data.sample
        return draw(self.config.test_samples, rng), rng


def told(results: Mapping[str, Any]) -> str:
    """How close the model came."""
    if "test_loss" in results:
        return f"loss on test images {results['test_loss']:.4f}"
    if "reconstruction_error" in results:
        return f"error of a reconstructed pixel {results['reconstruction_error']:.4f}"
    if "verdict" in results:
        low, high = results["log_likelihood_low"], results["log_likelihood_high"]
        return f"log-likelihood {low:.3f} to {high:.3f} nats per sample: {results['verdict']}"
    below = f", {results['kl']:.4f} below the data's own density" if "kl" in results else ""
    return f"log-likelihood {results['log_likelihood']:.4f} nats per sample{below}"


train = partial(loop.train, LatentModel)
run = partial(loop.launch, train, told)
