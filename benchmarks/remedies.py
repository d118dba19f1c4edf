"""What holds a diverging JEM on digits together, at equal compute: the field's remedies and β*.

    python -m benchmarks.remedies                # the whole grid, two runs at a time
    python -m benchmarks.remedies --table-only   # the table of what has been run

A run in the middle of a cell is resumed from its checkpoint.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .grid import Grid, Rows, number, percent, table, table_of
from .remedies_cell import CELLS, CLASSIFIER, REMEDIES, measure

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


def scale(judge: Mapping[str, Any]) -> str:
    """How well the judge classifies, and what it says of images and of noise."""
    said = [
        f"{name}: FID {scores['fid']:.3g}, IS {scores['is']:.3g} ({scores['samples']:,} images)"
        for name, scores in judge.items()
        if name != "accuracy"
    ]
    return "; ".join([f"test accuracy {percent(judge['accuracy'])}", *said])


def slots(rows: Rows) -> dict[str, str]:
    order = list(REMEDIES)
    runs = sorted(rows, key=lambda run: order.index(run["remedy"]))
    usual, longer = ([run for run in runs if run["longer"] == long] for long in (False, True))
    by_remedy = [[run for run in usual if run["remedy"] == remedy] for remedy in order]
    return {
        "judge": "; or ".join(sorted({scale(run["judge"]) for run in runs})),
        "summary": table_of([summed_up(own) for own in by_remedy if own]),
        "every": table(usual, EVERY),
        "longer": table(longer, EVERY),
    }


GRID = Grid("remedies", CELLS, measure, slots, CLASSIFIER)

if __name__ == "__main__":
    sys.exit(GRID.main())
