"""`ebmguard table jem`: Tables 1 and 2 of the robust objective beside JEM runs, and all runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby, product
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np

from ebmguard.errors import ConfigError, DiskError

from ..jem.paper import DIVERGED, METRICS, TABLE_1, TABLE_2, Metric, Scores
from ..jem.runs import JemRun, find_runs
from ..jem.scenarios import SCENARIOS
from ..plots.numbers import NONE, duration, markdown_table
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
    without validation images; IS and FID are the best, or the last where the features changed.
    """
    rows = run.evaluations
    validated = rows[np.isfinite(rows["valid_accuracy"])]
    accuracy = rows["accuracy"].dropna()[-1:]
    own = UNFINISHED * (not run.complete) + LOST * (run.diverged_at is not None)
    marks = own + FINAL * bool(len(accuracy) and validated.empty)
    if len(validated):
        accuracy = validated["accuracy"].loc[[validated["valid_accuracy"].idxmax()]].dropna()
    measured = rows[rows["features"].notna()]
    judged = own + MEASURE * (not measured["published"].all())
    if not measured["fixed"].all():
        measured = measured[-1:]
    inception, fid = (measured[name][np.isfinite(measured[name])] for name in ("inception", "fid"))
    return {
        "accuracy": Score("accuracy", tuple(accuracy), marks),
        "inception": Score("inception", tuple(inception.nlargest(1)), judged),
        "fid": Score("fid", tuple(fid.nsmallest(1)), judged),
    }


def over_seeds(metric: Metric, runs: Sequence[JemRun]) -> Score:
    """A metric over runs that differ in their seed alone."""
    found = [scores(run)[metric] for run in runs]
    values = tuple(value for score in found for value in score.values)
    return Score(metric, values, "".join(m for m in MARKS if any(m in s.marks for s in found)))


def best_beta_star(metric: Metric, by_beta_star: Mapping[float, list[JemRun]]) -> float | None:
    """The β* ≠ 0 with the best median; None where none has a value."""
    medians = {b: over_seeds(metric, runs).median for b, runs in by_beta_star.items() if b != 0}
    known = [b for b, value in medians.items() if not math.isnan(value)]
    best = min if metric == "fid" else max
    return best(known, key=medians.__getitem__, default=None)


def number(metric: Metric, value: float, *, as_published: bool = False) -> str:
    """A score as it is printed, accuracies as percentages; or with one digit, as in the paper."""
    digits = ".2f" if metric == "inception" and not as_published else ".1f"
    # Of features that are not Inception's, or of a lost run's, an FID may be on any scale.
    if metric == "fid" and not 10 <= value < 1e5:
        digits = ".3g"
    return f"{100 * value if metric == 'accuracy' else value:{digits}}"


def setups(runs: Iterable[JemRun]) -> dict[str, list[JemRun]]:
    """Runs of one arithmetic that differ from the published ones in the same settings, by a letter.

    The published setup is first; the others have the mark of one that is not published.
    """
    found: dict[tuple[str, ...], list[JemRun]] = {}
    for run in runs:
        own = (words.rpartition(", not ")[0] for words in run.deviations().values())
        found.setdefault((run.precision, *own), []).append(run)
    ordered = sorted(found.values(), key=lambda group: bool(group[0].deviations()))
    letters = ["".join(pair) for pair in product(("", *ascii_uppercase), ascii_uppercase)]
    return {
        letter + f" {OTHER}" * bool(group[0].deviations()): group
        for letter, group in zip(letters, ordered, strict=False)
    }


def describe(setup: Sequence[JemRun]) -> str:
    """How the runs of a setup differ from the published ones, in words."""
    # What is published may differ between scenarios, such as the learning rate.
    found = dict.fromkeys(words for run in setup for words in run.deviations().values())
    words = "; ".join(found) or "size and settings as published"
    return words + f"; in {setup[0].precision}" * (setup[0].precision != "float32")


def by_beta_star(setup: Iterable[JemRun], scenario: str) -> dict[float, list[JemRun]]:
    """The runs of a scenario by β*, ascending."""
    own = sorted((r for r in setup if r.scenario == scenario), key=lambda run: run.beta_star)
    return {beta_star: list(runs) for beta_star, runs in groupby(own, lambda run: run.beta_star)}


def run(config: TableConfig) -> int:
    """`ebmguard table jem`; its exit status is 0."""
    if not config.runs:
        raise ConfigError("name run folders of `ebmguard train jem`, or a folder that holds some")
    text = page(find_runs(config.runs))
    print(text, end="")
    if config.out is not None:
        try:
            config.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DiskError.of(config.out, error) from error
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


def table_1(setup: Sequence[JemRun], is_other: bool) -> str:
    """Scenario 1 of a setup by β*, beside the paper's Table 1."""
    runs, mark = by_beta_star(setup, "1"), f" {OTHER}" * is_other
    heads = ((f"{name} ours{mark}", "paper") for name in METRICS.values())
    rows = []
    for beta_star in sorted(runs | TABLE_1):
        own, published = runs.get(beta_star, []), TABLE_1.get(beta_star)
        settings = own[0].settings if own else SCENARIOS["1"].to_json()
        beta = beta_star * settings["noise_std"] ** 2 / (2 * settings["step_size"])
        pairs = ((_cell(metric, own), _paper(metric, published)) for metric in METRICS)
        rows.append([f"{beta_star:g}", f"{beta:g}", str(len(own)), *chain(*pairs)])
    return markdown_table(["β*", "β", "seeds", *chain(*heads)], rows)


def table_2(setup: Sequence[JemRun], is_other: bool) -> str:
    """Every scenario of a setup, below the same line of the paper's Table 2."""
    head = ["#", "scenario", "", "seeds", *(f"{name}, β* = 0" for name in METRICS.values())]
    head += [f"best {name} (β*)" for name in METRICS.values()]
    rows = []
    for scenario, paper in TABLE_2.items():
        runs = by_beta_star(setup, scenario)
        counts = sorted({len(own) for own in runs.values()})
        seeds = "–".join(dict.fromkeys(map(str, (*counts[:1], *counts[-1:]))))
        row = [scenario, paper.setup, "paper", ""]
        row += [_paper(metric, paper.at_zero) for metric in METRICS]
        at_zero = runs.pop(0.0, [])
        ours = ["", "", "ours" + f" {OTHER}" * is_other, seeds]
        ours += [_cell(metric, at_zero) for metric in METRICS]
        for metric in METRICS:
            beta_star = getattr(paper.best_beta_star, metric)
            row.append(f"{_paper(metric, paper.best)} ({beta_star:g})")
            best = best_beta_star(metric, runs)
            cell = _cell(metric, [*chain(*runs.values())] if best is None else runs[best])
            ours.append(cell if best is None else f"{cell} ({best:g})")
        rows += [row, ours]
    return markdown_table(head, rows, words=3)


def _cell(metric: Metric, runs: Sequence[JemRun]) -> str:
    return str(over_seeds(metric, runs)) if runs else "not run"


def _paper(metric: Metric, of: Scores | None) -> str:
    return NONE if of is None else number(metric, getattr(of, metric), as_published=True)


def run_table(groups: Mapping[str, Sequence[JemRun]]) -> str:
    """Every run: what it is, how far it got, and its scores."""
    head = ["run", "setup", "network", "data", "scenario", "β*", "seed", "iterations"]
    head += ["diverged at", "first ERROR", *METRICS.values(), "wall time"]
    rows = []
    for name, run in ((name, run) for name, runs in groups.items() for run in runs):
        row = [f"`{run.path.name}`", name, run.network, str(run.config["data"]), run.scenario]
        done = f"{run.steps:,} of {run.iterations:,}" + UNFINISHED * (not run.complete)
        error, seconds = run.first_error, (run.results or {}).get("wall_seconds")
        lost = "no" if run.complete else NONE
        if run.diverged_at is not None:
            epoch = run.epoch(run.diverged_at)
            lost = f"{run.diverged_at:,}" + f" (epoch {epoch:.3g})" * (not math.isnan(epoch))
        row += [f"{run.beta_star:g}", str(run.seed), done, lost]
        row.append("none" if error is None else f"{int(error['step']):,}: {error['rule']}")
        row += [str(score) if score.values else NONE for score in scores(run).values()]
        rows.append([*row, NONE if seconds is None else duration(float(seconds))])
    return markdown_table(head, rows, words=4)


def legend(runs: Sequence[JemRun]) -> str:
    """What the marks and the numbers mean, and what the paper says of divergence."""
    labels = {
        f"{features} ({int(samples):,} samples)"
        for run in runs
        for features, samples in run.evaluations[["features", "samples"]].dropna().to_numpy()
    }
    lines = [f"{mark} {meaning}" for mark, meaning in MARKS.items()]
    lines += [
        "Several seeds: median [smallest, largest]. ACC is the test accuracy at the best "
        "validation accuracy; IS and FID, of the replay buffer, are the best of the training.",
        "Features of IS and FID: " + ("; ".join(sorted(labels)) or "no run has any yet"),
        "The paper's β* is β · o, o being the output scale.",
    ]
    there = {run.scenario for run in runs}
    lines += [f"Paper, scenario {at}: {said}." for at, said in DIVERGED.items() if at in there]
    return "\n".join(f"- {line}" for line in lines)
