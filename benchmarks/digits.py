"""How β* decides the fate of a JEM on digits: seeds × β*, and two long runs.

python -m benchmarks.digits                # the whole grid, two runs at a time
python -m benchmarks.digits --table-only   # the page of what has been run
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from ebmguard import runs

from .grid import Grid, Rows, number, percent, table, trained

BETA_STARS, SEEDS, ITERATIONS = (0.0, 0.1, 0.5, 2.0), range(5), 2000
LONG_BETA_STAR, LONG_SEEDS, LONG_ITERATIONS = 2.0, range(2), 4000
MARKS, WINDOW = range(500, LONG_ITERATIONS + 1, 500), 100
AROUND = (-5, -3, -2, -1, 0, 1, 2, 3, 5, 10)
"""Steps around an alert whose accuracy is shown."""
SETTINGS = [(beta_star, seed, ITERATIONS) for seed in SEEDS for beta_star in BETA_STARS]
SETTINGS += [(LONG_BETA_STAR, seed, LONG_ITERATIONS) for seed in LONG_SEEDS]
CELLS = {
    f"b{beta_star:g}_s{seed}_n{n}": {"beta_star": beta_star, "seed": seed, "iterations": n}
    for beta_star, seed, n in SETTINGS
}


def measure(folder: Path, beta_star: float, seed: int, iterations: int) -> dict[str, Any]:
    """Train a run; its results, and the medians of its |gap|."""
    words = (f"--beta-star={beta_star:g}", f"--seed={seed}", f"--iterations={iterations}")
    results = trained("jem", folder, *words)
    gaps = runs.load(folder).rows["energy_gap"].droplevel("run").abs()
    marks = [mark for mark in MARKS if mark <= iterations]
    return {
        **results,
        "gaps": {mark: gaps.loc[mark - WINDOW : mark - 1].median() for mark in marks},
    }


def weights_of(run: Any, tag: str) -> Any:
    """At β* = 0 the weights are uniform; the reference exponent's say something."""
    name = f"{tag}_median_last_100"
    return run.get(f"reference_{name}" if run["beta_star"] == 0 else name)


def said(alert: Any) -> str:
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


def first_alerts(rows: Rows) -> Iterator[tuple[Any, Any]]:
    """The runs that diverged, with their first WARN and ERROR; a first ERROR stands alone."""
    for run in rows:
        found = [alert for alert in (run["first_warn"], run["first_error"]) if alert]
        if run["diverged_at"] is not None:
            if len(found) == 2 and found[0]["level"] == found[1]["level"]:
                found = found[:1]
            yield from ((run, alert) for alert in found)


def seen(offset: int) -> Any:
    return lambda x: percent(dict(x[1]["accuracy_around"]).get(x[1]["step"] + offset))


AROUND_ALERTS = {
    "β*": lambda x: f"{x[0]['beta_star']:g}",
    "seed": lambda x: str(x[0]["seed"]),
    "alert": lambda x: f"{x[1]['level']} {x[1]['rule']}",
    "at": lambda x: str(x[1]["step"]),
    **{f"{offset:+d}" if offset else "alert ": seen(offset) for offset in AROUND},
    "diverged": lambda x: f"{x[0]['diverged_at'] - x[1]['step']:+d}",
}


def gap_at(mark: int) -> Any:
    return lambda run: number(run["gaps"][str(mark)])


GAPS = {f"{mark - WINDOW}–{mark}": gap_at(mark) for mark in MARKS}


def slots(rows: Rows) -> dict[str, str]:
    short, long = ([x for x in rows if x["iterations"] == n] for n in (ITERATIONS, LONG_ITERATIONS))
    frame = pd.DataFrame(short, columns=["beta_star", "diverged_at", "accuracy"])
    return {
        "summary": table((own for _, own in frame.groupby("beta_star")), SUMMARY),
        "every": table(sorted(short, key=lambda run: (run["beta_star"], run["seed"])), FATE),
        "alerts": table(first_alerts(short), AROUND_ALERTS),
        "long": table(long, FATE),
        "gaps": table(long, {"seed": lambda run: str(run["seed"]), **GAPS}),
    }


GRID = Grid("digits", CELLS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
