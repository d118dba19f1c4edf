"""What holds a diverging JEM on digits together, at equal compute: the field's remedies and β*.

    python -m benchmarks.remedies                # the whole grid, two runs at a time
    python -m benchmarks.remedies --table-only   # the table of what has been run

Cells that are done are kept, so that an interrupted grid goes on where it was; a run in the middle
of a cell is resumed from its checkpoint. The table is written anew after each cell.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebmguard.reference_training.jem.scenarios import DIGITS

from .cells import commits, is_done, number, percent, read_json, rules, run_cells, write_page
from .remedies_cell import (
    CLIP_NORM,
    COMMAND,
    JUDGE,
    LONGER,
    REMEDIES,
    SEEDS,
    STEPS,
    Cell,
    batches,
    grid,
    iterations,
    run_cell,
    yardsticks,
)

FIT_GAP, FIT_GRAD_SCALE, FIT_ACCURACY = 20.0, 0.5, 0.97
"""A run ends fit with a median |gap| under the first, a GradScale at the reference exponent of at
least the second, both of the last 100 steps, and a final accuracy of at least the third."""


def load(cell: Cell, root: Path) -> dict[str, Any] | None:
    """What is known of a cell that is done."""
    if not is_done(cell, root):
        return None
    folder = root / cell.name
    return {**read_json(folder / "results.json"), **read_json(folder / "cell.json")}


def is_fit(results: Mapping[str, Any]) -> bool:
    """Whether the run ended in a state worth having, and not merely without divergence."""
    grad_scale = results["reference_grad_scale_median_last_100"]
    gap = results["median_abs_gap_last_100"]
    known = results["diverged_at"] is None and grad_scale is not None and gap is not None
    fit = known and gap < FIT_GAP and grad_scale >= FIT_GRAD_SCALE
    return bool(fit and results["accuracy"] >= FIT_ACCURACY)


def median_of(found: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Over runs, where there are any."""
    values = [float(r[name]) for r in found if r[name] is not None]
    return statistics.median(values) if values else None


def summary(cells: Sequence[Cell], root: Path) -> list[str]:
    lines = [
        "| remedy | steps | survived | ended fit | final accuracy: median, worst | best accuracy | "
        "median gap | GradScale | FID | IS | ms a step | s in all |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for remedy in REMEDIES:
        own = [load(cell, root) for cell in cells if cell.remedy == remedy]
        found = [r for r in own if r is not None]
        if not found:
            lines.append(f"| {remedy} | not run |" + " |" * 10)
            continue
        alive = [r for r in found if r["diverged_at"] is None]
        worst = min(r["accuracy"] for r in found)
        cost = median_of(found, "seconds_per_step")
        in_all = cost and cost * found[0]["iterations"]
        lines.append(
            f"| {remedy} | {found[0]['iterations']:,} | {len(alive)} of {len(found)} | "
            f"{sum(map(is_fit, found))} of {len(found)} | "
            f"{percent(median_of(found, 'accuracy'))}, {percent(worst)} | "
            f"{percent(median_of(found, 'best_accuracy'))} | "
            f"{number(median_of(alive, 'median_abs_gap_last_100'))} | "
            f"{number(median_of(alive, 'reference_grad_scale_median_last_100'))} | "
            f"{number(median_of(alive, 'fid'))} | {number(median_of(alive, 'is'))} | "
            f"{number(cost and 1000 * cost, '.1f')} | {number(in_all, '.0f')} |"
        )
    return lines


def every_run(cells: Sequence[Cell], root: Path) -> list[str]:
    lines = [
        "| remedy | seed | steps | diverged at | first ERROR | fit | final accuracy | best | "
        "median gap | GradScale | ESS / M | FID | IS | ms a step |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for remedy in REMEDIES:
        for cell in cells:
            results = load(cell, root)
            if cell.remedy != remedy or results is None:
                continue
            lost, error, cost = (
                results[name] for name in ("diverged_at", "first_error", "seconds_per_step")
            )
            lines.append(
                f"| {remedy} | {cell.seed} | {results['steps']:,} | "
                f"{'–' if lost is None else lost} | "
                f"{'–' if error is None else error['step']} | "
                f"{'yes' if is_fit(results) else 'no'} | {percent(results['accuracy'])} | "
                f"{percent(results['best_accuracy'])} | "
                f"{number(results['median_abs_gap_last_100'])} | "
                f"{number(results['reference_grad_scale_median_last_100'])} | "
                f"{number(results['reference_ess_median_last_100'], '.2f')} | "
                f"{number(results['fid'])} | {number(results['is'])} | "
                f"{number(cost and 1000 * cost, '.1f')} |"
            )
    return lines


def write_results(
    cells: Sequence[Cell], longer: Sequence[Cell], root: Path, target: Path, workers: int
) -> None:
    every = [*cells, *longer]
    done = sum(is_done(cell, root) for cell in every)
    scale = [
        f"{name}: FID {scores['fid']:.3g}, IS {scores['is']:.3g} ({scores['samples']:,} images)"
        for name, scores in yardsticks(root).items()
    ]
    accuracy = read_json(root / JUDGE / "results.json")["accuracy"]
    budget = batches(DIGITS.sgld_steps)
    lines = [
        "# Remedies for a diverging JEM, at equal compute on digits",
        "",
        f"Commit {', '.join(commits(root))}, {datetime.date.today()}, {platform.machine()} CPU, "
        f"one thread a run, {workers} runs at a time on two cores that others use too, "
        f"`python -m {COMMAND}`; {done} of {len(every)} runs done.",
        "",
        rules(root),
        "",
        "Settings are the defaults of `ebmguard train jem` (WRN-10-1, 64 positives and negatives, "
        f"Adam {DIGITS.lr:g}, {DIGITS.sgld_steps} SGLD steps of step size {DIGITS.step_size:g} and "
        f"noise {DIGITS.noise_std:g}) at β* = 0, with one thing changed. "
        f"Seeds {SEEDS.start} to {SEEDS.stop - 1}.",
        "",
        f"- Equal compute: that of {STEPS:,} default steps, counted in batches of 64 energies with "
        f"a gradient. A default step has {budget} ({DIGITS.sgld_steps} of the chains, positives, "
        f"negatives), twice the SGLD steps {batches(2 * DIGITS.sgld_steps)}, so that it gets "
        f"{iterations({'sgld_steps': 2 * DIGITS.sgld_steps}):,} steps. All others get {STEPS:,}.",
        "- Survived: never |energy gap| > 1e4, and all finite. A lost run is ended "
        f"{DIGITS.stop_after} steps later.",
        f"- Ended fit: survived, with a median |gap| under {FIT_GAP:g} and a GradScale at the "
        f"exponent 0.5 of at least {FIT_GRAD_SCALE:g}, both of the last 100 steps, and a final "
        f"test accuracy of at least {FIT_ACCURACY:.0%}.",
        f"- L2 on energies: 0.1 (mean f(x⁺)² + mean f(x⁻)²). Gradients are shortened to "
        f"{CLIP_NORM:g}, the median norm in healthy steps.",
        "- Gap, GradScale, FID and IS of the summary are medians over the runs that survived; "
        "accuracies are over all.",
        f"- FID and IS are of the {DIGITS.buffer_size:,} chains that a run ended with, against the "
        "training images, in the features of one classifier for all, trained apart without samples "
        f"(test accuracy {percent(accuracy)}). For scale, {'; '.join(scale)}. Published numbers "
        "are by another network: nothing here can stand beside them.",
        "- ms a step: CPU time, guard and logging included; median over the steps of a run, and "
        "over runs. s in all: times the steps.",
        "",
        *summary(cells, root),
        "",
        "## Every run",
        "",
        *every_run(cells, root),
        "",
        f"## {LONGER} times the compute",
        "",
        "Some of those that survive: whether they hold, or only take longer.",
        "",
        *every_run(longer, root),
        "",
    ]
    write_page(target, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench-remedies"))
    parser.add_argument("--table", type=Path, default=Path("docs/results/remedies.md"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer, to try it out")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--cell", help="run this cell alone, in this process")
    given = parser.parse_args()
    judge_cell, cells, longer = grid(given.steps)

    if given.cell is not None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        every = {cell.name: cell for cell in (judge_cell, *cells, *longer)}
        run_cell(every[given.cell], given.runs)
        return

    def write() -> None:
        write_results(cells, longer, given.runs, given.table, given.workers)

    if not given.table_only:
        run_cells([judge_cell], given.runs)
        run_cells([*cells, *longer], given.runs, workers=given.workers, after=write)
    write()
    print(given.table.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
