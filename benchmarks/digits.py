"""How β* decides the fate of a JEM on digits: seeds × β*, and two long runs.

python -m benchmarks.digits                # the whole grid, two runs at a time
python -m benchmarks.digits --table-only   # the table of what has been run
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ebmguard import cli, runs

from .cells import Grid, cell_command, load, number, percent, table, train_command, write_json

BETA_STARS = (0.0, 0.1, 0.5, 2.0)
SEEDS = range(5)
ITERATIONS = 2000
LONG_SEEDS = range(2)
LONG_ITERATIONS = 4000
LONG_BETA_STAR = 2.0
MARKS, WINDOW = range(500, LONG_ITERATIONS + 1, 500), 100
# Steps around an alert whose accuracy the second table shows.
AROUND = (-5, -3, -2, -1, 0, 1, 2, 3, 5, 10)


@dataclass(frozen=True)
class Cell:
    """One training run of the grid."""

    beta_star: float
    seed: int
    iterations: int

    @property
    def name(self) -> str:
        return f"b{self.beta_star:g}_s{self.seed}_n{self.iterations}"

    def command(self, folder: Path) -> Sequence[str]:
        return cell_command("digits", folder)


SHORT = [Cell(beta_star, seed, ITERATIONS) for seed in SEEDS for beta_star in BETA_STARS]
LONG = [Cell(LONG_BETA_STAR, seed, LONG_ITERATIONS) for seed in LONG_SEEDS]


def run(cell: Cell, root: Path) -> None:
    """Train a cell, and write the medians of its |gap| beside its results."""
    folder = root / cell.name
    words = [f"--beta-star={cell.beta_star:g}", f"--seed={cell.seed}"]
    words.append(f"--iterations={cell.iterations}")
    if status := cli.main(train_command("jem", folder, *words)[3:]):
        raise SystemExit(status)
    gaps = runs.load(folder).rows["energy_gap"].droplevel("run").abs()
    marks = [mark for mark in MARKS if mark <= cell.iterations]
    medians = {mark: gaps.loc[mark - WINDOW : mark - 1].median() for mark in marks}
    write_json(folder / "cell.json", {"gaps": medians})


def weights_of(run: dict[str, Any], tag: str) -> Any:
    """At β* = 0 the weights are uniform; the reference exponent's say something."""
    name = f"{tag}_median_last_100"
    return run.get(f"reference_{name}" if run["beta_star"] == 0 else name)


def said(alert: dict[str, Any] | None) -> str:
    """When a rule spoke, and which."""
    return "–" if alert is None else f"{alert['step']} ({alert['rule']})"


FATE = {
    "β*": lambda run: f"{run['beta_star']:g}",
    "seed": lambda run: str(run["seed"]),
    "diverged at": lambda run: number(run["diverged_at"], ".0f"),
    "first WARN": lambda run: said(run["first_warn"]),
    "first ERROR": lambda run: said(run["first_error"]),
    "best accuracy": lambda run: percent(run["best_accuracy"]),
    "final accuracy": lambda run: percent(run["accuracy"]),
    "GradScale": lambda run: number(weights_of(run, "grad_scale")),
    "ESS / M": lambda run: number(weights_of(run, "ess"), ".2f"),
    "median gap of the last 100 steps": lambda run: number(run["median_abs_gap_last_100"]),
}
SUMMARY = {
    "β*": lambda own: f"{own['beta_star'].iloc[0]:g}",
    "diverged": lambda own: f"{own['diverged_at'].count()} of {len(own)}",
    "first divergence": lambda own: number(min(own["diverged_at"].dropna(), default=None), ".0f"),
    "median final accuracy": lambda own: percent(own["accuracy"].median()),
}


def fate(cells: Iterable[Cell], root: Path) -> str:
    """What became of each run."""
    ordered = sorted(cells, key=lambda cell: (cell.beta_star, cell.seed))
    return table(load(ordered, root), FATE)


def summary(root: Path) -> str:
    """Of each β*, how many of its runs diverged."""
    found = pd.DataFrame(load(SHORT, root), columns=["beta_star", "diverged_at", "accuracy"])
    return table((own for _, own in found.groupby("beta_star")), SUMMARY)


def around_alerts(root: Path) -> str:
    """Accuracies around the first alerts of the runs that diverged."""

    def alerts() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for run in load(SHORT, root):
            if run["diverged_at"] is None:
                continue
            found = [alert for alert in (run["first_warn"], run["first_error"]) if alert]
            if len(found) == 2 and found[0]["level"] == found[1]["level"]:
                found = found[:1]  # the first alert was an ERROR already
            yield from ((run, alert) for alert in found)

    def seen(offset: int) -> Any:
        return lambda x: percent(dict(x[1]["accuracy_around"]).get(x[1]["step"] + offset))

    columns = {
        "β*": lambda x: f"{x[0]['beta_star']:g}",
        "seed": lambda x: str(x[0]["seed"]),
        "alert": lambda x: f"{x[1]['level']} {x[1]['rule']}",
        "at": lambda x: str(x[1]["step"]),
        **{f"{offset:+d}" if offset else "alert ": seen(offset) for offset in AROUND},
        "diverged": lambda x: f"{x[0]['diverged_at'] - x[1]['step']:+d}",
    }
    return table(alerts(), columns)


def gap_over_time(root: Path) -> str:
    """Medians of the long runs' |gap|."""

    def of(mark: int) -> Any:
        return lambda run: number(run["gaps"][str(mark)])

    columns = {f"{mark - WINDOW}–{mark}": of(mark) for mark in MARKS}
    return table(load(LONG, root), {"seed": lambda run: str(run["seed"]), **columns})


def page(root: Path) -> list[str]:
    """The lines of docs/results/digits.md."""
    return [
        "# JEM on digits: β* against divergence",
        "",
        *GRID.source(root),
        "Settings are the defaults of `ebmguard train jem`: WRN-10-1 without normalisation, 64 "
        "positives and negatives, Adam 3e-3, 5 SGLD steps of step size 1.0 and noise 0.01. A run "
        "has diverged at the first step with |energy gap| > 1e4. GradScale and ESS are medians of "
        "the last 100 steps; at β* = 0 those of the reference exponent 0.5.",
        "",
        summary(root),
        "",
        "## Every run",
        "",
        fate(SHORT, root),
        "",
        "## What was left when the guard spoke",
        "",
        "Test accuracy at steps around the first WARN and the first ERROR of each diverging run "
        "(accuracy at a step is that of the parameters it starts with), and how many steps after "
        "the alert the run counted as diverged.",
        "",
        around_alerts(root),
        "",
        f"## β* = {LONG_BETA_STAR:g} for {LONG_ITERATIONS:,} iterations",
        "",
        fate(LONG, root),
        "",
        "Median |energy gap| in windows of 100 steps:",
        "",
        gap_over_time(root),
        "",
    ]


GRID = Grid(
    "digits",
    SHORT + LONG,
    page,
    Path("docs/results/digits.md"),
    Path("runs/bench-digits"),
    run,
    kept=True,
)

if __name__ == "__main__":
    GRID.main()
