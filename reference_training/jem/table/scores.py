"""What the tables say of a run, and of the seeds of one β*."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..paper import Metric
from ..runs import JemRun

UNFINISHED, DIVERGED, MEASURE, FINAL, OTHER = "…", "†", "‡", "§", "≠"

MARKS = {
    OTHER: "another setup than the published run's: no reproduction of its numbers",
    UNFINISHED: "stopped or still running: what it has so far",
    DIVERGED: "diverged",
    MEASURE: "IS and FID are not of Inception's features of 10,000 samples: not comparable with "
    "the paper's. Where a run's own classifier judges them, which changes as it learns, they are "
    "the last ones, and not comparable between runs either",
    FINAL: "no validation images: the last test accuracy",
}
"""The marks behind numbers."""


@dataclass(frozen=True)
class RunScores:
    """A run as the paper's tables put it.

    Attributes:
        accuracy: test accuracy, a fraction, at the evaluation of the best validation accuracy, the
            first of equals; the last test accuracy where there are no validation images. None
            before the first evaluation.
        inception: the highest Inception score of all evaluations, or None; the last one where the
            features changed from one evaluation to the next.
        fid: the lowest Fréchet distance likewise.
        marks: those of the accuracy, and those of the other two.
    """

    accuracy: float | None
    inception: float | None
    fid: float | None
    marks: tuple[str, str]

    def value(self, metric: Metric) -> float | None:
        """A metric by its name."""
        found: float | None = getattr(self, metric)
        return found

    def marked(self, metric: Metric) -> str:
        """The marks of a metric."""
        return self.marks[metric != "accuracy"]


def run_scores(run: JemRun) -> RunScores:
    """The scores of a run, as far as it got. Values that are not finite are never the best."""
    validated = [row for row in run.evaluations if _is_number(row.valid_accuracy)]
    tested = [row for row in run.evaluations if row.test_accuracy is not None]
    if validated:
        accuracy = max(validated, key=lambda row: (row.valid_accuracy, -row.step)).test_accuracy
    else:
        accuracy = tested[-1].test_accuracy if tested else None
    own = (UNFINISHED if not run.complete else "") + (
        DIVERGED if run.diverged_at is not None else ""
    )
    measured = [row for row in run.evaluations if row.features is not None]
    comparable = all(row.published_measure for row in measured)
    if not all(row.features_fixed for row in measured):
        measured = measured[-1:]
    return RunScores(
        accuracy=accuracy,
        inception=_best(max, (row.inception for row in measured)),
        fid=_best(min, (row.fid for row in measured)),
        marks=(own + (FINAL if tested and not validated else ""), own + MEASURE * (not comparable)),
    )


@dataclass(frozen=True)
class Cell:
    """A metric over the seeds of one β*.

    Attributes:
        metric: which one.
        values: one for each seed that has it.
        marks: of any of the seeds.
    """

    metric: Metric
    values: tuple[float, ...]
    marks: str

    @property
    def median(self) -> float:
        """Over seeds; NaN where none has a value."""
        return statistics.median(self.values) if self.values else math.nan

    def __str__(self) -> str:
        if not self.values:
            return "no value" + self.marks
        text = number(self.metric, self.median)
        low, high = (number(self.metric, pick(self.values)) for pick in (min, max))
        return text + (f" [{low}, {high}]" if low != high else "") + self.marks


def cell(metric: Metric, runs: Sequence[JemRun]) -> Cell:
    """A metric over runs that differ in their seed alone."""
    found = [run_scores(run) for run in runs]
    return Cell(
        metric=metric,
        values=tuple(value for scores in found if (value := scores.value(metric)) is not None),
        marks="".join(m for m in MARKS if any(m in scores.marked(metric) for scores in found)),
    )


def best_beta_star(metric: Metric, by_beta_star: dict[float, list[JemRun]]) -> float | None:
    """The β* ≠ 0 with the best median; None where none has a value."""
    medians = {
        beta_star: cell(metric, runs).median
        for beta_star, runs in by_beta_star.items()
        if beta_star != 0
    }
    known = {beta_star: value for beta_star, value in medians.items() if not math.isnan(value)}
    sign = -1 if metric == "fid" else 1
    return max(known, key=lambda beta_star: sign * known[beta_star], default=None)


def number(metric: Metric, value: float) -> str:
    """A score as it is printed: accuracies as percentages."""
    if metric == "inception":
        return f"{value:.2f}"
    if metric == "fid" and not 10 <= value < 1e5:
        # Of features that are not Inception's, or of a lost run's, it may be on any scale.
        return f"{value:.3g}"
    return as_published(metric, value)


def as_published(metric: Metric, value: float) -> str:
    """A score as the paper prints it, with one digit after the point."""
    return f"{100 * value if metric == 'accuracy' else value:.1f}"


@dataclass(frozen=True)
class Setup:
    """Runs that differ from their published ones in the same way, in one arithmetic.

    Attributes:
        name: a letter.
        runs: at least one, ordered.
    """

    name: str
    runs: tuple[JemRun, ...]

    @property
    def published(self) -> bool:
        """Whether the runs have the published size and settings."""
        return not self.runs[0].deviations()

    @property
    def title(self) -> str:
        """The letter, with the mark of a setup that is not the published one."""
        return self.name if self.published else f"{self.name} {OTHER}"

    def describe(self) -> str:
        """The differences, in words."""
        # What is published may differ between scenarios, such as the learning rate.
        found = dict.fromkeys(str(item) for run in self.runs for item in run.deviations())
        words = "; ".join(found) or "size and settings as published"
        precision = self.runs[0].precision
        return words if precision == "float32" else f"{words}; in {precision}"

    def of(self, scenario: str) -> dict[float, list[JemRun]]:
        """The runs of a scenario by β*, ascending."""
        found: dict[float, list[JemRun]] = {}
        for run in self.runs:
            if run.scenario == scenario:
                found.setdefault(run.beta_star, []).append(run)
        return dict(sorted(found.items()))


def setups(runs: Iterable[JemRun]) -> list[Setup]:
    """The runs by how they differ from the published ones, the published setup first."""
    found: dict[tuple[str, ...], list[JemRun]] = {}
    for run in runs:
        own = (f"{item.name} {item.own!r}" for item in run.deviations())
        found.setdefault((run.precision, *own), []).append(run)
    ordered = sorted(found.values(), key=lambda group: bool(group[0].deviations()))
    return [Setup(_letters(i), tuple(group)) for i, group in enumerate(ordered)]


def _letters(index: int) -> str:
    """A to Z, then AA, AB and so on."""
    first, last = divmod(index, 26)
    return (_letters(first - 1) if first else "") + chr(ord("A") + last)


def _best(pick: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return pick(known) if known else None


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
