"""What holds a diverging JEM on digits together, at equal compute: the field's remedies and β*.

    python -m benchmarks.remedies                # the whole grid, two runs at a time
    python -m benchmarks.remedies --table-only   # the table of what has been run

A run in the middle of a cell is resumed from its checkpoint. What came of the cells is kept beside
the page, with what their judge was worth.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from ebmguard.reference_training.jem.scenarios import DIGITS

from .cells import Grid, load, number, percent, table
from .remedies_cell import (
    CLIP_NORM,
    POOLED,
    REMEDIES,
    SEEDS,
    STEPS,
    Cell,
    batches,
    grid,
    iterations,
    run_cell,
)

FIT_GAP, FIT_GRAD_SCALE, FIT_ACCURACY = 20.0, 0.5, 0.97
"""A run ends fit with a median |gap| under the first, a GradScale at the reference exponent of at
least the second, both of the last 100 steps, and a final accuracy of at least the third."""


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


def ms(seconds: float | None) -> str:
    """Of a step."""
    return number(seconds and 1000 * seconds, ".1f")


def summed_up(own: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of a remedy's runs, one line."""
    alive = [run for run in own if run["diverged_at"] is None]
    steps, cost = own[0]["iterations"], median_of(own, "seconds_per_step")
    worst = min(run["accuracy"] for run in own)
    return {
        "remedy": own[0]["remedy"],
        "steps": f"{steps:,}",
        "survived": f"{len(alive)} of {len(own)}",
        "ended fit": f"{sum(map(is_fit, own))} of {len(own)}",
        "final accuracy: median, worst": f"{percent(median_of(own, 'accuracy'))}, {percent(worst)}",
        "best accuracy": percent(median_of(own, "best_accuracy")),
        "median gap": number(median_of(alive, "median_abs_gap_last_100")),
        "GradScale": number(median_of(alive, "reference_grad_scale_median_last_100")),
        "FID": number(median_of(alive, "fid")),
        "IS": number(median_of(alive, "is")),
        "best FID": number(median_of(own, "best_fid")),
        "best IS": number(median_of(own, "best_is")),
        "ms a step": ms(cost),
        "s in all": number(cost and cost * steps, ".0f"),
    }


def summary(cells: Sequence[Cell], root: Path) -> str:
    """A line for each remedy."""
    found = load(cells, root)
    by_remedy = [[run for run in found if run["remedy"] == remedy] for remedy in REMEDIES]
    lines = [summed_up(own) for own in by_remedy if own]
    return table(lines, {name: itemgetter(name) for name in lines[0]}) if lines else "None yet."


EVERY = {
    "remedy": lambda run: run["remedy"],
    "seed": lambda run: str(run["seed"]),
    "steps": lambda run: f"{run['steps']:,}",
    "diverged at": lambda run: number(run["diverged_at"], ".0f"),
    "first ERROR": lambda run: number((run["first_error"] or {}).get("step"), ".0f"),
    "fit": lambda run: "yes" if is_fit(run) else "no",
    "final accuracy": lambda run: percent(run["accuracy"]),
    "best": lambda run: percent(run["best_accuracy"]),
    "median gap": lambda run: number(run["median_abs_gap_last_100"]),
    "GradScale": lambda run: number(run["reference_grad_scale_median_last_100"]),
    "ESS / M": lambda run: number(run["reference_ess_median_last_100"], ".2f"),
    "FID": lambda run: number(run["fid"]),
    "IS": lambda run: number(run["is"]),
    "best FID": lambda run: number(run["best_fid"]),
    "ms a step": lambda run: ms(run["seconds_per_step"]),
}


def every_run(cells: Sequence[Cell], root: Path) -> str:
    """A line for each run, remedy by remedy."""
    order = list(REMEDIES)
    ordered = sorted(cells, key=lambda cell: order.index(cell.remedy or ""))
    found = load(ordered, root)
    return table(found, EVERY) if found else "None yet."


def scale(judge: Mapping[str, Any]) -> str:
    """How well the judge classifies, and what it says of images and of noise."""
    said = [
        f"{name}: FID {scores['fid']:.3g}, IS {scores['is']:.3g} ({scores['samples']:,} images)"
        for name, scores in judge.items()
        if name != "accuracy"
    ]
    return "; ".join([f"test accuracy {percent(judge['accuracy'])}", *said])


def page(root: Path, *, cells: Sequence[Cell], longer: Sequence[Cell], source: Any) -> list[str]:
    """The lines of docs/results/remedies.md."""
    judges = {scale(run["judge"]) for run in load([*cells, *longer], root)}
    budget = batches(DIGITS.sgld_steps)
    return [
        "# Remedies for a diverging JEM, at equal compute on digits",
        "",
        *source(root),
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
        "accuracies and the best FID and IS are over all.",
        f"- FID and IS are of the {DIGITS.buffer_size:,} chains that a run ended with, against the "
        "training images, in the features of one classifier for all, trained apart without "
        f"samples ({'; or '.join(sorted(judges)) or 'not yet'}). Published numbers are by another "
        f"network: nothing here can stand beside them. Best FID and IS are the best of {POOLED} "
        "looks in a row at 64 negatives, one every 50 steps of training.",
        "- ms a step: CPU time, guard and logging included; median over the steps of a run, and "
        "over runs. s in all: times the steps.",
        "",
        summary(cells, root),
        "",
        "## Every run",
        "",
        every_run(cells, root),
        "",
        "## At three times the compute and more",
        "",
        "Some of those that survive: whether they hold, or only take longer.",
        "",
        every_run(longer, root),
        "",
    ]


def main() -> None:
    """Run the grid, or one cell of it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer, to try it out")
    given, _ = parser.parse_known_args()
    judge, cells, longer = grid(given.steps)

    def lines(root: Path) -> list[str]:
        return page(root, cells=cells, longer=longer, source=own.source)

    runs = Path("runs/bench-remedies")
    target = Path("docs/results/remedies.md")
    kept = given.steps == STEPS
    own = Grid("remedies", [*cells, *longer], lines, target, runs, run_cell, judge, kept)
    own.main(None, parser)


if __name__ == "__main__":
    main()
