"""What a trainer has to be; all else is the engine's."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ebmguard import Guard, tags
from ebmguard.alerts import Alert

from .record import Record

DIVERGED_GAP = 1e4
"""A run has diverged at the first step whose |energy gap| exceeds this, or is not finite."""


class Part(Protocol):
    """What a step changes: a network, an optimizer, a stream of random numbers, ..."""

    def state_dict(self) -> Any:
        """Tensors and plain values."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go back to a saved state."""


class Streams:
    """Base of what draws the random numbers of a step, from streams that go on after a resume.

    Args:
        streams: by name.
    """

    def __init__(self, streams: Mapping[str, torch.Generator]) -> None:
        self._streams = dict(streams)

    def state_dict(self) -> dict[str, Tensor]:
        """Where each stream stands."""
        return {name: rng.get_state() for name, rng in self._streams.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a saved state."""
        for name, rng in self._streams.items():
            rng.set_state(state[name].cpu())


class Task(Protocol):
    """A training, step by step, as :func:`..engine.loop.train` runs it.

    Its constructor takes the settings and a :class:`.record.Record`, which has the device, the
    ranks, the folder and, for the task's guards, `for_guard`.

    Attributes:
        title: what a person sees of it.
        parts: all that a step changes, by name, but for the guards: what checkpoints hold.
        guards: by name. The first one's steps are those of the run, its rows and its rollbacks;
            others may stand beside it.
        record: as the constructor got it.
        unit: what a step is called in what a person reads.
        lines_every: steps between the lines on a terminal without a progress bar.
        stop_after: steps that a diverged run goes on for; None: to its end.
    """

    title: str
    parts: Mapping[str, Part]
    guards: Mapping[str, Guard]
    record: Record
    unit: ClassVar[str] = "step"
    lines_every: int = 100
    stop_after: int | None = None

    @abc.abstractmethod
    def step(self, step: int) -> Tensor | None:
        """Train one step, and give the first guard's row its own numbers (:meth:`Guard.log`).

        Args:
            step: its number, from 0.

        Returns:
            Its negatives, where it has some.

        Raises:
            DivergenceError: a guard has ended the run.
        """

    @abc.abstractmethod
    def results(self) -> dict[str, Any]:
        """What results.json holds beside what the engine knows; every rank comes here at the end.

        The guards have judged all their rows by then (`record.guard_rows`).
        """

    def begin(self) -> None:
        """The run is a new one: nothing is loaded."""

    def before_step(self, step: int) -> None:
        """Look at the parameters that a step begins with."""

    def keep(self, step: int, samples: Tensor | None) -> None:
        """Keep samples of a step; its row may still be on the device."""

    def see(self, step: int, row: Mapping[str, float]) -> str | None:
        """Take in the first guard's row of a step, in the order of the steps; on every rank.

        Returns:
            In words, why the run is lost; None while it is not.
        """
        gap = row.get(tags.ENERGY_GAP, 0.0)
        return None if abs(gap) <= DIVERGED_GAP else f"energy gap {gap:.3g}"

    def first_alert(self, alert: Alert) -> None:
        """An alert is the first that has reached WARN, or ERROR."""

    def evaluate(self, step: int) -> bool:
        """Evaluate after so many steps, where that is due; whether it was: a checkpoint follows."""
        return False

    def roll_back(self, step: int) -> None:
        """The guard goes back to `step`; the record is still that of the course given up."""

    def shown(self, row: Mapping[str, float]) -> dict[str, float | str]:
        """What is worth a look while it trains, by name.

        Args:
            row: the guard's latest.
        """
        beta_star = getattr(self.record.config, "beta_star", 1.0)
        found = {"gap": row.get(tags.ENERGY_GAP)}
        for name, tag in (("GradScale", tags.GRAD_SCALE), ("ESS", tags.ESS)):
            found[name] = row.get(tags.weight_tag(tag, beta_star))
        shown: dict[str, float | str] = {k: v for k, v in found.items() if v is not None}
        return {**shown, "alert": self.record.last_alert}
