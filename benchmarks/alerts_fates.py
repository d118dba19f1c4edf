"""What became of each recorded run, by its outcome alone, and what the shipped rules say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ebmguard.alerts import Alert, Judge, Level
from ebmguard.sinks import read_jsonl

from .cells import read_json

TUNE = frozenset(
    {"base", "k3", "neg32", "step2", "lr5e-3_neg32", "lr1e-2_k10", "lr3e-2_k3", "lr3e-4"}
)
"""Settings whose runs were looked at to choose thresholds; those of all others were not."""
FIELD_CHECK = 1e8
KEPT = ("energy_gap", "ref/grad_scale", "ref/reweighting_angle", "sampler/grad_norm")
LAST = 100
HEALTHY_GAP, HEALTHY_GRAD_SCALE, HEALTHY_LOSS = 20.0, 0.5, 0.02
"""A run is healthy if it ended with a median |gap| under the first and a median GradScale at the
reference exponent of at least the second, both of the last 100 steps, and a test accuracy at most
the third under its best."""

Row = dict[str, float]
Kind = Literal["diverged", "healthy", "in between"]


@dataclass(frozen=True)
class Fate:
    """One run.

    Attributes:
        name: of its folder.
        setting: all but β* and the seed.
        beta_star: its β*.
        rows: KEPT of the guard's rows, one a step, from step 0.
        accuracy: (step, test accuracy of the parameters that the step starts with), by step.
        diverged_at: first step with |energy gap| > 1e4, or None.
        finished: whether it ran to its end.
        alerts: what the shipped rules say of the rows.
    """

    name: str
    setting: str
    beta_star: float
    rows: list[Row]
    accuracy: list[tuple[int, float]]
    diverged_at: int | None
    finished: bool
    alerts: list[Alert]

    @property
    def is_tune(self) -> bool:
        """Whether its setting is of the half that thresholds were chosen on."""
        return self.setting in TUNE

    @property
    def kind(self) -> Kind:
        """By outcome; no alert has a say in it."""
        if self.diverged_at is not None:
            return "diverged"
        ends_well = (
            self.finished
            and self.gap < HEALTHY_GAP
            and self.grad_scale >= HEALTHY_GRAD_SCALE
            and self.best() - self.accuracy[-1][1] <= HEALTHY_LOSS + 1e-9
        )
        return "healthy" if ends_well else "in between"

    @property
    def gap(self) -> float:
        """Median |energy gap| of the last steps."""
        return median(abs(row["energy_gap"]) for row in self.rows[-LAST:])

    @property
    def grad_scale(self) -> float:
        """Median GradScale at the reference exponent of the last steps."""
        return median(row["ref/grad_scale"] for row in self.rows[-LAST:])

    @property
    def error(self) -> Alert | None:
        """The first ERROR: what an action would have acted on."""
        return next((each for each in self.alerts if each.level is Level.ERROR), None)

    @property
    def last_error(self) -> Alert | None:
        """The ERROR that a divergence was announced by: the last one up to it."""
        if self.diverged_at is None:
            return None
        errors = [each for each in self.alerts if each.level is Level.ERROR]
        return next((each for each in reversed(errors) if each.step <= self.diverged_at), None)

    @property
    def field_check(self) -> int | None:
        """First step at which the field's own check, |loss| > 1e8, stops the run. NaN passes it."""
        above = (i for i, row in enumerate(self.rows) if abs(row["energy_gap"]) > FIELD_CHECK)
        return next(above, None)

    def accuracy_at(self, step: int) -> float:
        """Of the parameters before the update of `step`, or of the last ones that were tested."""
        return [value for at, value in self.accuracy if at <= step][-1]

    def best(self, step: int | None = None) -> float:
        """Best accuracy, up to a step."""
        return max(value for at, value in self.accuracy if step is None or at <= step)

    def largest_gap(self, until: int) -> float:
        """Largest |gap| before a step."""
        return max((abs(row["energy_gap"]) for row in self.rows[:until]), default=0.0)


def read_fates(names: Sequence[str], root: Path) -> list[Fate]:
    """The runs that have been recorded to their end, judged by the shipped rules."""
    return [read_fate(root / name) for name in names if (root / name / "result.json").is_file()]


def read_fate(folder: Path) -> Fate:
    """One run, from its result.json and metrics.jsonl."""
    result: dict[str, Any] = read_json(folder / "result.json")
    rows: list[Row] = read_jsonl(folder / "metrics.jsonl")
    judge = Judge()
    alerts = [each for row in rows for each in judge.observe(int(row["step"]), row)]
    return Fate(
        name=result["name"],
        setting=result["name"].split("_", 1)[1].rsplit("_s", 1)[0],
        beta_star=result["beta_star"],
        rows=[{tag: row[tag] for tag in KEPT} for row in rows],
        accuracy=[(int(step), float(value)) for step, value in result["accuracy"]],
        diverged_at=result["diverged_at"],
        finished=result["steps"] == len(rows) and result["diverged_at"] is None,
        alerts=alerts,
    )
