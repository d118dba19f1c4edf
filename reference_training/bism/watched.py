"""What training latent-variable models has in common, whichever the model: the guard watches."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ebmguard import guard

from ..engine.record import Record
from ..engine.task import Streams, Task
from .config import BismConfig
from .deep_config import DeepConfig
from .matching import LogDensity
from .presets import UpdateSettings

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
        own_streams = [torch.Generator(record.device).manual_seed(each) for each in seeds]
        self.data, self.update, self.chains = own_streams
        super().__init__(dict(zip(("data", "update", "chains"), own_streams, strict=True)))


class Chains:
    """Chains of the model as it trains, with where they stand, ``(count, ...)``."""

    def __init__(self, v: Tensor) -> None:
        self.v = v

    def state_dict(self) -> Tensor:
        """For a checkpoint."""
        return self.v

    def load_state_dict(self, state: Tensor) -> None:
        """Go back to a saved state."""
        self.v = state


class WatchedModel(Task):
    """A model that trains by a loss of its own, with chains of it that the guard watches.

    Args:
        config, record: of the run.
        settings: of its updates.
        entries: of a sample.
    """

    unit = "update"
    chains: Chains

    def __init__(
        self,
        config: BismConfig | DeepConfig,
        record: Record,
        settings: UpdateSettings,
        entries: int,
    ) -> None:
        self.record, self._evaluations, self._held = record, config.evaluations, settings.held
        self.title = f"{settings.method} on {config.data}"
        self.draws = Draws(record, settings.has_chains)
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

    def _seen(self, v: Tensor) -> Tensor:
        """This rank's part of a minibatch, with the noise of the data that the model learns."""
        v = v[self.record.ranks.part(len(v))]
        if not self._held:
            return v
        return v + self._held * torch.randn(v.shape, generator=self.draws.chains, device=v.device)

    def _watch(
        self, f: LogDensity, v: Tensor, samples: Tensor, numbers: Mapping[str, Tensor]
    ) -> Tensor:
        """Show the guard a step with such numbers, once this rank's chains stand at `samples`."""
        self.chains.v = samples
        v = self._seen(v)
        with torch.no_grad():
            energies = f(v), f(samples)
        self.loss_fn(*energies)  # which leaves no trace where gradients are off
        self.loss_fn.guard.log(self.record.ranks.means(numbers))
        return samples


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
