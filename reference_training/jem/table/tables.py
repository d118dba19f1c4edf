"""Tables 1 and 2 with the paper's numbers, and the list of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...plots.markdown import NONE, markdown_table
from ...plots.numbers import duration
from ..paper import DIVERGED as PAPER_DIVERGED
from ..paper import METRICS, TABLE_1, TABLE_2, Metric
from ..runs import JemRun
from ..scenarios import SCENARIOS
from .scores import (
    MARKS,
    OTHER,
    UNFINISHED,
    Setup,
    as_published,
    best_beta_star,
    cell,
    number,
    run_scores,
    setups,
)

METRIC_NAMES: tuple[Metric, ...] = tuple(METRICS)


def page(runs: Sequence[JemRun]) -> str:
    """The tables of some runs, with their legend, as Markdown."""
    groups = setups(runs)
    parts = ["## Setups", "\n".join(f"- {group.title}: {group.describe()}" for group in groups)]
    for group in groups:
        if group.of("1"):
            title = f"## Table 1, setup {group.title}: scenario 1 by β*"
            parts += [title, table_1(group)]
        if any(group.of(scenario) for scenario in TABLE_2):
            title = f"## Table 2, setup {group.title}: β* = 0, and the best β* ≠ 0 of each metric"
            parts += [title, table_2(group)]
    parts += ["## Runs", run_table(groups), "## Marks", legend(runs)]
    return "\n\n".join(parts) + "\n"


def table_1(setup: Setup) -> str:
    """Scenario 1 of a setup by β*, beside the paper's Table 1."""
    runs = setup.of("1")
    head = ["β*", "β", "seeds"]
    for name in METRICS.values():
        head += [f"{name} ours{'' if setup.published else ' ' + OTHER}", "paper"]
    rows = []
    for beta_star in sorted(runs | TABLE_1):
        own = runs.get(beta_star, [])
        row = [f"{beta_star:g}", f"{beta_star / _output_scale(own):g}", str(len(own))]
        for metric in METRIC_NAMES:
            row.append(str(cell(metric, own)) if own else "not run")
            published = TABLE_1.get(beta_star)
            row.append(as_published(metric, getattr(published, metric)) if published else NONE)
        rows.append(row)
    return markdown_table(head, rows)


def table_2(setup: Setup) -> str:
    """Every scenario of a setup, below the same line of the paper's Table 2."""
    head = ["#", "scenario", "", "seeds"]
    head += [f"{name}, β* = 0" for name in METRICS.values()]
    head += [f"best {name} (β*)" for name in METRICS.values()]
    rows = []
    for scenario, published in TABLE_2.items():
        row = [scenario, published.setup, "paper", ""]
        row += [as_published(metric, getattr(published.at_zero, metric)) for metric in METRIC_NAMES]
        for metric in METRIC_NAMES:
            value = as_published(metric, getattr(published.best, metric))
            row.append(f"{value} ({getattr(published.best_beta_star, metric):g})")
        rows += [row, _ours(setup, scenario)]
    return markdown_table(head, rows, words=3)


def run_table(groups: Sequence[Setup]) -> str:
    """Every run: what it is, how far it got, and its scores."""
    head = ["run", "setup", "network", "data", "scenario", "β*", "seed", "iterations"]
    head += ["diverged at", "first ERROR", *METRICS.values(), "wall time"]
    rows = [[*_who(group, run), *_how(run)] for group in groups for run in group.runs]
    return markdown_table(head, rows, words=4)


def legend(runs: Sequence[JemRun]) -> str:
    """What the marks and the numbers mean, and what the paper says of divergence."""
    labels = {
        f"{row.features} ({row.samples:,} samples)"
        for run in runs
        for row in run.evaluations
        if row.features is not None
    }
    lines = [f"{mark} {meaning}" for mark, meaning in MARKS.items()]
    lines += [
        "Several seeds: median [smallest, largest]. ACC is the test accuracy at the best "
        "validation accuracy; IS and FID, of the replay buffer, are the best of the training.",
        "Features of IS and FID: " + ("; ".join(sorted(labels)) or "no run has any yet"),
        "The paper's β* is β · o, o being the output scale.",
    ]
    lines += [
        f"Paper, scenario {scenario}: {said}."
        for scenario, said in PAPER_DIVERGED.items()
        if any(run.scenario == scenario for run in runs)
    ]
    return "\n".join(f"- {line}" for line in lines)


def _ours(setup: Setup, scenario: str) -> list[str]:
    runs = setup.of(scenario)
    name = "ours" if setup.published else f"ours {OTHER}"
    if not runs:
        return ["", "", name, "", *["not run"] * (2 * len(METRICS))]
    zero = runs.get(0.0, [])
    counts = sorted({len(own) for own in runs.values()})
    row = ["", "", name, "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))]
    row += [str(cell(metric, zero)) if zero else "not run" for metric in METRIC_NAMES]
    for metric in METRIC_NAMES:
        best = best_beta_star(metric, runs)
        others = [run for beta_star, own in runs.items() if beta_star != 0 for run in own]
        if best is None:
            row.append(str(cell(metric, others)) if others else "not run")
        else:
            row.append(f"{cell(metric, runs[best])} ({best:g})")
    return row


def _who(group: Setup, run: JemRun) -> list[str]:
    return [
        f"`{run.path.name}`",
        group.title,
        run.network,
        str(run.config["data"]),
        run.scenario,
        f"{run.beta_star:g}",
        str(run.seed),
        f"{run.steps:,} of {run.iterations:,}" + ("" if run.complete else UNFINISHED),
    ]


def _how(run: JemRun) -> list[str]:
    scores = run_scores(run)
    texts = []
    for metric in METRIC_NAMES:
        value = scores.value(metric)
        texts.append(NONE if value is None else number(metric, value) + scores.marked(metric))
    error = run.first_error
    alert = "none" if error is None else f"{int(error['step']):,}: {error['rule']}"
    seconds = None if run.results is None else run.results.get("wall_seconds")
    wall = NONE if seconds is None else duration(float(seconds))
    return [_lost(run), alert, *texts, wall]


def _lost(run: JemRun) -> str:
    if run.diverged_at is None:
        return "no" if run.complete else NONE
    epoch = run.epoch(run.diverged_at)
    return f"{run.diverged_at:,}" + ("" if math.isnan(epoch) else f" (epoch {epoch:.3g})")


def _output_scale(runs: Sequence[JemRun]) -> float:
    settings = runs[0].settings if runs else SCENARIOS["1"].to_json()
    noise = float(settings["noise_std"])
    return 2 * float(settings["step_size"]) / noise**2 if noise else math.inf
