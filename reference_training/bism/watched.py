"""What training latent-variable models has in common, whichever the model: the guard watches."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ebmguard import guard

from ..engine.record import Record
from ..engine.streams import Streams
from ..engine.task import Step, Task

EVALUATIONS = "evaluations.jsonl"
TEST_SEED = 0xB15
"""Of what every evaluation draws: the same each time."""


class Draws(Streams):
    """Random numbers of the data, of the updates and of the watched chains."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.data, self.update, self.chains = (
            torch.Generator(device).manual_seed(3 * seed + i) for i in range(3)
        )
        super().__init__({"data": self.data, "update": self.update, "chains": self.chains})


class Chains:
    """Chains of the model as it trains.

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


class WatchedModel(Task):
    """A model that trains by a loss of its own, with chains of it that the guard watches.

    Args:
        record: of the run.
        seed: of the random numbers.
        iterations: updates of the run.
        evaluations: of the run, the last one at its end.
    """

    unit = "update"
    chains: Chains

    def __init__(self, record: Record, *, seed: int, iterations: int, evaluations: int) -> None:
        self.record, self.draws = record, Draws(seed, record.device)
        self._iterations, self._evaluations = iterations, evaluations
        # The energies that it gets are no part of the loss, and no sampler is tempered.
        self.loss_fn, _ = guard(None, None, beta_star=0.0, output_scale=1.0, **record.for_guard)
        self.guards = {"guard": self.loss_fn.guard}

    @abc.abstractmethod
    def measure(self) -> Mapping[str, Any]:
        """What an evaluation finds, by name."""

    def evaluate(self, step: int) -> bool:
        """Measure the model where that is due."""
        before, now = (done * self._evaluations // self._iterations for done in (step - 1, step))
        if now > before:
            self.record.folder.append_rows(EVALUATIONS, [{"step": step, **self.measure()}])
        return now > before

    def _watch(
        self,
        f: Callable[[Tensor], Tensor],
        v: Tensor,
        samples: Tensor,
        numbers: Mapping[str, Tensor],
    ) -> Step:
        """What a step with such numbers tells, once the chains stand at `samples`."""
        self.chains.v = samples
        with torch.no_grad():
            f_pos, f_neg = f(v), f(samples)
            self.loss_fn(f_pos, f_neg)
        return Step({**numbers, "energy_gap": f_pos.mean() - f_neg.mean()}, samples)
