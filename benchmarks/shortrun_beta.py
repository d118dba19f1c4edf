"""β* on short-run training: how far it can go up, and what the adaptive sampler changes.

python -m benchmarks.shortrun_beta                # all runs, two at a time: an hour
python -m benchmarks.shortrun_beta --table-only   # the page of what has been run
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.judge.shortrun import judged
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.sinks import read_jsonl, to_json

from .grid import RESULTS, Grid, Rows, number, table, trained

BETA_STARS = (0.0, 0.02, 0.2, 2.0, 20.0, 200.0, 2000.0)
ADAPTIVE, MOST = (20.0, 200.0), 4
"""β* that are also run with up to MOST times the steps, each as much finer."""
ITERATIONS = {"digits": 700, "mnist": 400}
JUDGE: Mapping[str, tuple[str, ...]] = {
    "digits": ("--iterations=2000", "--valid-images=200"),
    # The small network of the digits, on 14x14 pixels.
    "mnist": (
        *("--iterations=1000", "--image-size=14", "--scenario=digits", "--eval-every=200"),
        *("--valid-images=1000", "--test-images=1000"),
    ),
}
"""Options of the classifier whose features the FID is taken of."""
SAMPLES = 1000
JUDGES: dict[str, dict[str, Any]] = {f"{data}-judge": {"data": data} for data in ITERATIONS}
CELLS: dict[str, dict[str, Any]] = {
    f"{data}-b{beta_star:g}{f'-most{most}' if most > 1 else ''}": {
        "data": data,
        "beta_star": beta_star,
        "most_steps": most,
    }
    for data in ITERATIONS
    for most, beta_stars in ((1, BETA_STARS), (MOST, ADAPTIVE))
    for beta_star in beta_stars
}


def measure(
    folder: Path, data: str, beta_star: float | None = None, most_steps: int = 1
) -> dict[str, Any]:
    """Train a run, and judge its samples; without a β* the classifier that judges the others."""
    if beta_star is None:
        plain = ("--p-x-weight=0", "--n-labelled=0", f"--data={data}")
        return trained("jem", folder, *plain, *JUDGE[data])
    words = (f"--data={data}", f"--beta-star={beta_star:g}", f"--iterations={ITERATIONS[data]}")
    results = trained("shortrun", folder, *words, f"--most-steps={most_steps}")
    steps = [row["sgld_steps"] for row in read_jsonl(folder / "metrics.jsonl")]
    return {**results, "K": sum(steps) / len(steps), "scores": scores(folder, data)}


def scores(folder: Path, data: str) -> dict[str, Any]:
    """FID and Inception score of fresh samples, of held-out images and of noise."""
    device = torch.device("cpu")
    features = load_features(str(folder.with_name(f"{data}-judge")), device)
    found: dict[str, Any] = to_json(judged(load_run(folder, device), features, SAMPLES))["scores"]
    return found


def weight(run: Any, name: str) -> str:
    """At β* = 0 the weights are uniform; the reference exponent's say something."""
    return number(run["median_last_100"][f"{'' if run['beta_star'] else 'ref/'}{name}"])


def said(run: Any) -> str:
    alerts = [alert for alert in (run["first_warn"], run["first_error"]) if alert]
    return ", ".join(dict.fromkeys(f"{a['level']} {a['rule']} @{a['step']}" for a in alerts))


COLUMNS = {
    "β*": lambda run: f"{run['beta_star']:g}" + " adaptive" * (run["most_steps"] > 1),
    "K": lambda run: f"{run['K']:.0f}",
    "gap": lambda run: number(run["median_last_100"]["energy_gap"]),
    "GradScale": lambda run: weight(run, "grad_scale"),
    "ESS": lambda run: weight(run, "ess"),
    "FID": lambda run: number(run["scores"]["samples"]["fid"]),
    "alerts": lambda run: said(run) or "none",
}


def table_and_floor(runs: Rows) -> str:
    """One line for each run, and the FID of held-out images and of noise below."""
    if not runs:
        return table(runs, COLUMNS)
    held_out, noise = (runs[-1]["scores"][name] for name in ("held_out", "noise"))
    return (
        f"{table(runs, COLUMNS)}\n\nFID of held-out images {number(held_out['fid'])} (IS "
        f"{number(held_out['is'])}) and the noise at the start {number(noise['fid'])} (IS "
        f"{number(noise['is'])})."
    )


def slots(rows: Rows) -> dict[str, str]:
    of = {data: [run for run in rows if run["data"] == data] for data in ITERATIONS}
    return {data: table_and_floor(runs) for data, runs in of.items()}


PAGE = RESULTS / "shortrun-beta.md"
GRID = Grid("shortrun_beta", CELLS, measure, slots, JUDGES, PAGE)

if __name__ == "__main__":
    sys.exit(GRID.main())
