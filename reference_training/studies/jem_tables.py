"""`ebmguard table jem`: Tables 1 and 2 of the robust objective beside JEM runs, and all runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ebmguard.errors import ConfigError

from ..jem.paper import DIVERGED, METRICS, TABLE_1, TABLE_2, Metric
from ..jem.runs import JemRun, find_runs
from ..jem.scenarios import SCENARIOS
from ..plots.markdown import NONE, markdown_table
from ..plots.numbers import duration
from .config import TableConfig

UNFINISHED, LOST, MEASURE, FINAL, OTHER = "…", "†", "‡", "§", "≠"
MARKS = {
    OTHER: "another setup than the published run's: no reproduction of its numbers",
    UNFINISHED: "stopped or still running: what it has so far",
    LOST: "diverged",
    MEASURE: "IS and FID are not of Inception's features of 10,000 samples: not comparable with "
    "the paper's. Where a run's own classifier judges them, which changes as it learns, they are "
    "the last ones, and not comparable between runs either",
    FINAL: "no validation images: the last test accuracy",
}
"""The marks behind numbers."""


class Score(NamedTuple):
    """A metric of one run, or of the seeds of one β*: values that there are, and marks."""

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
        low, text, high = (
            number(self.metric, x) for x in (min(self.values), self.median, max(self.values))
        )
        return text + (f" [{low}, {high}]" if low != high else "") + self.marks


def scores(run: JemRun) -> dict[Metric, Score]:
    """The scores of a run, as far as it got. Values that are not finite are never the best.

    The test accuracy is that at the best validation accuracy, the first of equals, or the last one
    where there are no validation images; Inception score and FID are the best of all evaluations,
    or the last ones where the features changed from one to the next.
    """
    rows = run.evaluations
    validated = [row for row in rows if _known([row.valid_accuracy])]
    tested = [row for row in rows if row.test_accuracy is not None]
    last = tested[-1:]
    if validated:
        last = [max(validated, key=lambda row: (row.valid_accuracy, -row.step))]
    own = UNFINISHED * (not run.complete) + LOST * (run.diverged_at is not None)
    measured = [row for row in rows if row.features is not None]
    judged = own + MEASURE * (not all(row.published_measure for row in measured))
    if not all(row.features_fixed for row in measured):
        measured = measured[-1:]
    accuracy = tuple(row.test_accuracy for row in last if row.test_accuracy is not None)
    inception, fid = (_known(getattr(r, n) for r in measured) for n in ("inception", "fid"))
    marks = own + FINAL * bool(tested and not validated)
    return {
        "accuracy": Score("accuracy", accuracy, marks),
        "inception": Score("inception", tuple(sorted(inception)[-1:]), judged),
        "fid": Score("fid", tuple(sorted(fid)[:1]), judged),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def shown(score: Score) -> str:
    """A score of one run as tables have it."""
    return str(score) if score.values else NONE


def over_seeds(metric: Metric, runs: Sequence[JemRun]) -> Score:
    """A metric over runs that differ in their seed alone."""
    found = [scores(run)[metric] for run in runs]
    values = tuple(value for score in found for value in score.values)
    return Score(metric, values, "".join(m for m in MARKS if any(m in s.marks for s in found)))


def best_beta_star(metric: Metric, by_beta_star: Mapping[float, list[JemRun]]) -> float | None:
    """The β* ≠ 0 with the best median; None where none has a value."""
    medians = {b: over_seeds(metric, runs).median for b, runs in by_beta_star.items() if b != 0}
    known = {b: -value if metric == "fid" else value for b, value in medians.items()}
    return max((b for b in known if not math.isnan(known[b])), key=known.__getitem__, default=None)


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


def setups(runs: Iterable[JemRun]) -> dict[str, list[JemRun]]:
    """Runs that differ from the published ones in the same way, in one arithmetic, by a letter.

    The published setup is first; the others have the mark of one that is not published.
    """
    found: dict[tuple[str, ...], list[JemRun]] = {}
    for run in runs:
        own = (f"{item.name} {item.own!r}" for item in run.deviations())
        found.setdefault((run.precision, *own), []).append(run)
    ordered = sorted(found.values(), key=lambda group: bool(group[0].deviations()))
    return {
        _letters(i) + f" {OTHER}" * bool(group[0].deviations()): group
        for i, group in enumerate(ordered)
    }


def _letters(index: int) -> str:
    """A to Z, then AA, AB and so on."""
    first, last = divmod(index, 26)
    return (_letters(first - 1) if first else "") + chr(ord("A") + last)


def describe(setup: Sequence[JemRun]) -> str:
    """How the runs of a setup differ from the published ones, in words."""
    # What is published may differ between scenarios, such as the learning rate.
    found = dict.fromkeys(str(item) for run in setup for item in run.deviations())
    words = "; ".join(found) or "size and settings as published"
    precision = setup[0].precision
    return words if precision == "float32" else f"{words}; in {precision}"


def by_beta_star(setup: Iterable[JemRun], scenario: str) -> dict[float, list[JemRun]]:
    """The runs of a scenario by β*, ascending."""
    found: dict[float, list[JemRun]] = {}
    for run in setup:
        if run.scenario == scenario:
            found.setdefault(run.beta_star, []).append(run)
    return dict(sorted(found.items()))


def run(config: TableConfig) -> int:
    """`ebmguard table jem`.

    Returns:
        Exit status 0.
    """
    if not config.runs:
        raise ConfigError("name run folders of `ebmguard train jem`, or a folder that holds some")
    text = page(find_runs(config.runs))
    print(text, end="")
    if config.out is not None:
        try:
            config.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{config.out} cannot be written: {error}") from error
    return 0


def page(runs: Sequence[JemRun]) -> str:
    """The tables of some runs, with their legend, as Markdown."""
    groups = setups(runs)
    parts = ["## Setups", "\n".join(f"- {name}: {describe(own)}" for name, own in groups.items())]
    for name, own in groups.items():
        if by_beta_star(own, "1"):
            parts += [f"## Table 1, setup {name}: scenario 1 by β*", table_1(own, OTHER in name)]
        if any(by_beta_star(own, scenario) for scenario in TABLE_2):
            title = f"## Table 2, setup {name}: β* = 0, and the best β* ≠ 0 of each metric"
            parts += [title, table_2(own, OTHER in name)]
    parts += ["## Runs", run_table(groups), "## Marks", legend(runs)]
    return "\n\n".join(parts) + "\n"


def _each(value: Callable[[Metric], str]) -> list[str]:
    return [value(metric) for metric in METRICS]


def table_1(setup: Sequence[JemRun], is_other: bool) -> str:
    """Scenario 1 of a setup by β*, beside the paper's Table 1."""
    runs = by_beta_star(setup, "1")
    head = ["β*", "β", "seeds"]
    for name in METRICS.values():
        head += [f"{name} ours{f' {OTHER}' * is_other}", "paper"]
    rows = []
    for beta_star in sorted(runs | TABLE_1):
        own, published = runs.get(beta_star, []), TABLE_1.get(beta_star)
        settings = own[0].settings if own else SCENARIOS["1"].to_json()
        noise = float(settings["noise_std"])
        scale = 2 * float(settings["step_size"]) / noise**2 if noise else math.inf
        row = [f"{beta_star:g}", f"{beta_star / scale:g}", str(len(own))]
        for metric in METRICS:
            row.append(str(over_seeds(metric, own)) if own else "not run")
            row.append(as_published(metric, getattr(published, metric)) if published else NONE)
        rows.append(row)
    return markdown_table(head, rows)


def table_2(setup: Sequence[JemRun], is_other: bool) -> str:
    """Every scenario of a setup, below the same line of the paper's Table 2."""
    head = ["#", "scenario", "", "seeds", *(f"{name}, β* = 0" for name in METRICS.values())]
    head += [f"best {name} (β*)" for name in METRICS.values()]
    rows = []
    for scenario, paper in TABLE_2.items():
        row = [scenario, paper.setup, "paper", ""]
        row += _each(lambda m, p=paper: as_published(m, getattr(p.at_zero, m)))  # type: ignore[misc]
        for metric in METRICS:
            value = as_published(metric, getattr(paper.best, metric))
            row.append(f"{value} ({getattr(paper.best_beta_star, metric):g})")
        rows += [row, _ours(by_beta_star(setup, scenario), "ours" + f" {OTHER}" * is_other)]
    return markdown_table(head, rows, words=3)


def _ours(runs: Mapping[float, list[JemRun]], name: str) -> list[str]:
    if not runs:
        return ["", "", name, "", *["not run"] * (2 * len(METRICS))]
    zero, others = runs.get(0.0, []), [run for b, own in runs.items() if b for run in own]
    counts = sorted({len(own) for own in runs.values()})
    row = ["", "", name, "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))]
    row += _each(lambda metric: str(over_seeds(metric, zero)) if zero else "not run")
    for metric in METRICS:
        best = best_beta_star(metric, runs)
        if best is None:
            row.append(str(over_seeds(metric, others)) if others else "not run")
        else:
            row.append(f"{over_seeds(metric, runs[best])} ({best:g})")
    return row


def run_table(groups: Mapping[str, Sequence[JemRun]]) -> str:
    """Every run: what it is, how far it got, and its scores."""
    head = ["run", "setup", "network", "data", "scenario", "β*", "seed", "iterations"]
    head += ["diverged at", "first ERROR", *METRICS.values(), "wall time"]
    rows = []
    for name, runs in groups.items():
        for run in runs:
            row = [f"`{run.path.name}`", name, run.network, str(run.config["data"]), run.scenario]
            done = f"{run.steps:,} of {run.iterations:,}" + UNFINISHED * (not run.complete)
            row += [f"{run.beta_star:g}", str(run.seed), done, _lost(run)]
            error, results = run.first_error, run.results or {}
            row.append("none" if error is None else f"{int(error['step']):,}: {error['rule']}")
            row += map(shown, scores(run).values())
            seconds = results.get("wall_seconds")
            rows.append([*row, NONE if seconds is None else duration(float(seconds))])
    return markdown_table(head, rows, words=4)


def _lost(run: JemRun) -> str:
    if run.diverged_at is None:
        return "no" if run.complete else NONE
    epoch = run.epoch(run.diverged_at)
    return f"{run.diverged_at:,}" + ("" if math.isnan(epoch) else f" (epoch {epoch:.3g})")


def legend(runs: Sequence[JemRun]) -> str:
    """What the marks and the numbers mean, and what the paper says of divergence."""
    rows = [row for run in runs for row in run.evaluations if row.features is not None]
    labels = {f"{row.features} ({row.samples:,} samples)" for row in rows}
    lines = [f"{mark} {meaning}" for mark, meaning in MARKS.items()]
    lines += [
        "Several seeds: median [smallest, largest]. ACC is the test accuracy at the best "
        "validation accuracy; IS and FID, of the replay buffer, are the best of the training.",
        "Features of IS and FID: " + ("; ".join(sorted(labels)) or "no run has any yet"),
        "The paper's β* is β · o, o being the output scale.",
    ]
    lines += [
        f"Paper, scenario {scenario}: {said}."
        for scenario, said in DIVERGED.items()
        if any(run.scenario == scenario for run in runs)
    ]
    return "\n".join(f"- {line}" for line in lines)
