"""K of short runs: from 5 to 200 Langevin steps, and drawn anew from 100 to 120, three seeds each.

python -m benchmarks.shortrun_steps                # all runs, two at a time
python -m benchmarks.shortrun_steps --table-only   # the page of what has been run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ebmguard.reference_training.shortrun.trained import TrainedRun, load_run
from ebmguard.samplers import sgld

from . import shortrun_beta
from .grid import Grid, Rows, number, table, table_of, trained

SEEDS = range(3)
USUAL = 100
KINDS = ((100, None), (100, 120), *((k, None) for k in (5, 10, 25, 50, 200, 150, 75)))
"""K, or from K to so many, in the order in which a seed's runs are begun."""
ITERATIONS = 500
CHAINS = 256
CELLS = {
    f"k{k}{f'to{most}' if most else ''}_s{seed}": {"k": k, "most": most, "seed": seed}
    for seed in SEEDS
    for k, most in KINDS
}
JUDGE = {"digits-judge": {"k": None, "most": None, "seed": 0}}


def measure(folder: Path, k: int | None, most: int | None, seed: int) -> dict[str, Any]:
    """Train a run, judge its samples, and say what the ends of its chains depend on."""
    if k is None:
        return shortrun_beta.measure(folder, "digits")
    words = ["--data=digits", "--beta-star=0", f"--seed={seed}", f"--iterations={ITERATIONS}"]
    words += [f"--sgld-steps={k}", *([f"--most-sgld-steps={most}"] if most else [])]
    results = trained("shortrun", folder, *words)
    own = {"chains": chains(folder)} if (k, most) == (USUAL, None) else {}
    return {**results, "scores": shortrun_beta.scores(folder, "digits"), **own}


def chains(folder: Path) -> dict[str, float]:
    """How far apart the ends of chains are that differ in one thing from plain ones.

    Root mean square over pixels, of K steps as in the training; they differ in f times a factor, no
    noise, other noise, or other starts and noise.
    """
    torch.set_num_threads(1)
    run = load_run(folder, torch.device("cpu"))
    rng = torch.Generator().manual_seed(0)

    def draw() -> tuple[Tensor, Tensor]:
        x0 = run.starts(CHAINS, rng)
        return x0, torch.randn((run.settings.sgld_steps, *x0.shape), generator=rng)

    x0, noise = draw()
    others, other = draw()
    plain = climb(run, x0, noise)
    ends = {
        "0.9 f": climb(run, x0, noise, 0.9),
        "0.5 f": climb(run, x0, noise, 0.5),
        "no noise": climb(run, x0, torch.zeros_like(noise)),
        "other noise": climb(run, x0, other),
        "other starts": climb(run, others, other),
    }
    return {name: float((x - plain).square().mean().sqrt()) for name, x in ends.items()}


def climb(run: TrainedRun, x0: Tensor, noise: Tensor, factor: float = 1.0) -> Tensor:
    """The training's chains on f times a factor."""
    size = {"step_size": factor * run.settings.step_size, "noise_std": run.settings.noise_std}
    return sgld(run.network, x0, steps=len(noise), noise=noise, **size)


def over_seeds(values: Sequence[float]) -> str:
    """The median, and what it is one of."""
    return f"{number(median(values))} ({', '.join(number(value) for value in values)})"


BY_STEPS = {
    "K": lambda own: f"{own[0]['k']} to {own[0]['most']}" if own[0]["most"] else str(own[0]["k"]),
    "runs": lambda own: str(len(own)),
    "FID": lambda own: over_seeds([run["scores"]["samples"]["fid"] for run in own]),
    "IS": lambda own: number(median(run["scores"]["samples"]["is"] for run in own)),
    "gap": lambda own: over_seeds([run["median_last_100"]["energy_gap"] for run in own]),
    "diverged": lambda own: str(sum(run["diverged_at"] is not None for run in own)),
}


def slots(rows: Rows) -> dict[str, str]:
    kind = itemgetter("k", "most")
    kinds = sorted(set(map(kind, rows)), key=lambda own: (own[0], own[1] or 0))
    apart = [{"seed": run["seed"], **run["chains"]} for run in rows if "chains" in run]
    return {
        "steps": table([[run for run in rows if kind(run) == each] for each in kinds], BY_STEPS),
        "chains": table_of([{name: number(x) for name, x in own.items()} for own in apart]),
    }


GRID = Grid("shortrun_steps", CELLS, measure, slots, JUDGE)

if __name__ == "__main__":
    sys.exit(GRID.main())
