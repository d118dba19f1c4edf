"""How β* decides the fate of a JEM on digits: seeds × β*, and two long runs.

    python -m benchmarks.digits                # the whole grid, two runs at a time
    python -m benchmarks.digits --table-only   # the table of what has been run

Every run is one cell: cells that are there already are kept, so that an interrupted grid goes on
where it was. The table is written anew after each cell.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cells import commits, number, percent, read_json, rules, run_cells, write_page

BETA_STARS = (0.0, 0.1, 0.5, 2.0)
SEEDS = range(5)
ITERATIONS = 2000
LONG_SEEDS = range(2)
LONG_ITERATIONS = 4000
LONG_BETA_STAR = 2.0
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
        words = [sys.executable, "-m", "ebmguard", "train", "jem", "--out", str(folder)]
        if (folder / "config.json").is_file():
            return [*words, "--resume"]
        words += ["--beta-star", f"{self.beta_star:g}", "--seed", str(self.seed)]
        return [*words, "--iterations", str(self.iterations)]


GRID = [Cell(beta_star, seed, ITERATIONS) for seed in SEEDS for beta_star in BETA_STARS]
LONG = [Cell(LONG_BETA_STAR, seed, LONG_ITERATIONS) for seed in LONG_SEEDS]


def load(cell: Cell, root: Path) -> dict[str, Any] | None:
    file = root / cell.name / "results.json"
    if not file.is_file():
        return None
    return read_json(file)


def weights_of(cell: Cell, results: dict[str, Any], tag: str) -> Any:
    """At β* = 0 the weights are uniform; the reference exponent's say something."""
    name = f"{tag}_median_last_100"
    return results.get(f"reference_{name}" if cell.beta_star == 0 else name)


def fate(cells: list[Cell], root: Path) -> list[str]:
    lines = [
        "| β* | seed | diverged at | first WARN | first ERROR | best accuracy | final accuracy | "
        "GradScale | ESS / M | median gap of the last 100 steps |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in sorted(cells, key=lambda cell: (cell.beta_star, cell.seed)):
        results = load(cell, root)
        if results is None:
            lines.append(f"| {cell.beta_star:g} | {cell.seed} | not run |" + " |" * 7)
            continue
        alerts = [
            "–"
            if results[level] is None
            else f"{results[level]['step']} ({results[level]['rule']})"
            for level in ("first_warn", "first_error")
        ]
        lost = results["diverged_at"]
        lines.append(
            f"| {cell.beta_star:g} | {cell.seed} | {'–' if lost is None else lost} | {alerts[0]} | "
            f"{alerts[1]} | {percent(results['best_accuracy'])} | {percent(results['accuracy'])} | "
            f"{number(weights_of(cell, results, 'grad_scale'))} | "
            f"{number(weights_of(cell, results, 'ess'), '.2f')} | "
            f"{number(results['median_abs_gap_last_100'])} |"
        )
    return lines


def summary(root: Path) -> list[str]:
    lines = [
        "| β* | diverged | first divergence | median final accuracy |",
        "|---:|---:|---:|---:|",
    ]
    for beta_star in BETA_STARS:
        found = [load(cell, root) for cell in GRID if cell.beta_star == beta_star]
        results = [r for r in found if r is not None]
        if not results:
            continue
        lost = [r["diverged_at"] for r in results if r["diverged_at"] is not None]
        accuracy = statistics.median(r["accuracy"] for r in results)
        lines.append(
            f"| {beta_star:g} | {len(lost)} of {len(results)} | {min(lost) if lost else '–'} | "
            f"{percent(accuracy)} |"
        )
    return lines


def around_alerts(root: Path) -> list[str]:
    head = " | ".join(f"{offset:+d}" if offset else "alert" for offset in AROUND)
    lines = [
        f"| β* | seed | alert | at | {head} | diverged |",
        "|---:|---:|---|---:|" + "---:|" * (len(AROUND) + 1),
    ]
    for cell in GRID:
        results = load(cell, root)
        if results is None or results["diverged_at"] is None:
            continue
        alerts = [results[level] for level in ("first_warn", "first_error") if results[level]]
        if len(alerts) == 2 and alerts[0]["level"] == alerts[1]["level"]:
            alerts = alerts[:1]  # the first alert was an ERROR already
        for alert in alerts:
            seen = dict(alert["accuracy_around"])
            cells = [percent(seen.get(alert["step"] + offset)) for offset in AROUND]
            after = results["diverged_at"] - alert["step"]
            lines.append(
                f"| {cell.beta_star:g} | {cell.seed} | {alert['level']} {alert['rule']} | "
                f"{alert['step']} | {' | '.join(cells)} | {after:+d} |"
            )
    return lines


def gap_over_time(root: Path) -> list[str]:
    from ebmguard.report import RecordedRun

    marks = range(500, LONG_ITERATIONS + 1, 500)
    lines = [
        "| seed | " + " | ".join(f"{mark - 100}–{mark}" for mark in marks) + " |",
        "|---:|" + "---:|" * len(marks),
    ]
    for cell in LONG:
        if load(cell, root) is None:
            continue
        run = RecordedRun.read(root / cell.name, whole=["energy_gap"])
        by_step = dict(run.series("energy_gap"))
        medians = [
            [abs(by_step[step]) for step in range(mark - 100, mark) if step in by_step]
            for mark in marks
        ]
        lines.append(
            f"| {cell.seed} | "
            + " | ".join(number(statistics.median(m)) if m else "–" for m in medians)
            + " |"
        )
    return lines


def write_table(root: Path, target: Path, words: list[str]) -> None:
    done = sum(load(cell, root) is not None for cell in GRID + LONG)
    lines = [
        "# JEM on digits: β* against divergence",
        "",
        f"Commit {', '.join(commits(root))}, {datetime.date.today()}, {platform.machine()} CPU, "
        f"one thread a run, `{' '.join(words)}`; {done} of {len(GRID) + len(LONG)} runs done.",
        "",
        rules(root),
        "",
        "Settings are the defaults of `ebmguard train jem`: WRN-10-1 without normalisation, 64 "
        "positives and negatives, Adam 3e-3, 5 SGLD steps of step size 1.0 and noise 0.01. A run "
        "has diverged at the first step with |energy gap| > 1e4. GradScale and ESS are medians of "
        "the last 100 steps; at β* = 0 those of the reference exponent 0.5.",
        "",
        *summary(root),
        "",
        "## Every run",
        "",
        *fate(GRID, root),
        "",
        "## What was left when the guard spoke",
        "",
        "Test accuracy at steps around the first WARN and the first ERROR of each diverging run "
        "(accuracy at a step is that of the parameters it starts with), and how many steps after "
        "the alert the run counted as diverged.",
        "",
        *around_alerts(root),
        "",
        f"## β* = {LONG_BETA_STAR:g} for {LONG_ITERATIONS:,} iterations",
        "",
        *fate(LONG, root),
        "",
        "Median |energy gap| in windows of 100 steps:",
        "",
        *gap_over_time(root),
        "",
    ]
    write_page(target, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench-digits"))
    parser.add_argument("--table", type=Path, default=Path("docs/results/digits.md"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--table-only", action="store_true")
    given = parser.parse_args()
    words = ["python", "-m", "benchmarks.digits"]

    def write() -> None:
        write_table(given.runs, given.table, words)

    if not given.table_only:
        run_cells(GRID + LONG, given.runs, workers=given.workers, after=write)
    write()
    print(given.table.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
