"""What a trainer has to be; all else is the engine's."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

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


class Step(NamedTuple):
    """What a training step tells.

    Attributes:
        numbers: 0-dim tensors on the device by name, the same names in every step; of several
            ranks, this one's part of their average. `energy_gap` is mean f+ - mean f-.
        samples: its negatives, where it has some.
        known: further entries of the step's row, which are on the host already.
    """

    numbers: Mapping[str, Tensor]
    samples: Tensor | None = None
    known: Mapping[str, Any] = {}


class Task(Protocol):
    """A training, step by step, as :func:`..engine.loop.train` runs it.

    Its constructor takes the settings and a :class:`.record.Record`, which has the device, the
    ranks, the folder and, for the task's guards, `for_guard`.

    Attributes:
        title: what a person sees of it.
        parts: all that a step changes, by name, but for the guards: what checkpoints hold.
        guards: by name. The first one's steps are those of the run, and its rollbacks; others may
            stand beside it.
        record: as the constructor got it.
        unit: what a step is called in what a person reads.
        hidden: numbers that training.jsonl does not get.
        curves: TensorBoard's tags, by number.
        lines_every: steps between the lines on a terminal without a progress bar.
        stop_after: steps that a diverged run goes on for; None: to its end.
    """

    title: str
    parts: Mapping[str, Part]
    guards: Mapping[str, Guard]
    record: Record
    unit: ClassVar[str] = "step"
    hidden: ClassVar[tuple[str, ...]] = ()
    curves: ClassVar[Mapping[str, str]] = {}
    lines_every: int = 100
    stop_after: int | None = None

    @abc.abstractmethod
    def step(self, step: int) -> Step:
        """Train one step.

        Args:
            step: its number, from 0.

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
        """Keep samples of a step; its numbers are still on the device."""

    def see(self, step: int, numbers: Mapping[str, float]) -> str | None:
        """Take in a step's numbers, which have reached the host, in the order of the steps.

        Returns:
            In words, why the run is lost; None while it is not.
        """
        gap = numbers.get("energy_gap", 0.0)
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
        found = {"gap": self.record.numbers.get("energy_gap")}
        for name, tag in (("GradScale", tags.GRAD_SCALE), ("ESS", tags.ESS)):
            found[name] = row.get(tags.weight_tag(tag, beta_star))
        shown: dict[str, float | str] = {k: v for k, v in found.items() if v is not None}
        return {**shown, "alert": self.record.last_alert}
