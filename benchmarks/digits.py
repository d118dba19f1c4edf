"""How β* decides the fate of a JEM on digits: seeds × β*, and two long runs.

python -m benchmarks.digits                # the whole grid, two runs at a time
python -m benchmarks.digits --table-only   # the page of what has been run
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

from ebmguard import runs

from .grid import Grid, Rows, number, percent, table, trained

BETA_STARS, SEEDS, ITERATIONS = (0.0, 0.1, 0.5, 2.0), range(5), 2000
LONG_BETA_STAR, LONG_SEEDS, LONG_ITERATIONS = 2.0, range(2), 4000
MARKS, WINDOW = range(500, LONG_ITERATIONS + 1, 500), 100
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


SUMMARY = {
    "β*": lambda own: f"{own['beta_star'].iloc[0]:g}",
    "diverged": lambda own: f"{own['diverged_at'].count()} of {len(own)}",
    "first divergence": lambda own: number(own["diverged_at"].min(), ".0f"),
    "median final accuracy": lambda own: percent(own["accuracy"].median()),
}


def slots(rows: Rows) -> dict[str, str]:
    short = [x for x in rows if x["iterations"] == ITERATIONS]
    frame = pd.DataFrame(short, columns=["beta_star", "diverged_at", "accuracy"])
    return {"summary": table((own for _, own in frame.groupby("beta_star")), SUMMARY)}


GRID = Grid("digits", CELLS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
