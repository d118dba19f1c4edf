"""K of short runs: from 5 to 200 Langevin steps, and drawn anew from 100 to 120, three seeds each.

python -m benchmarks.shortrun_steps                # all runs, two at a time
python -m benchmarks.shortrun_steps --table-only   # the tables of what has been run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ebmguard.reference_training.shortrun.trained import TrainedRun, load_run
from ebmguard.samplers import sgld

from .cells import Grid, is_done, load, number, read_json, table, train_command, write_json
from .shortrun_beta import Cell as Judge
from .shortrun_beta import measure

SEEDS = range(3)
USUAL = 100
RANDOM = (100, 120)
OTHERS = (5, 10, 25, 50, 200, 150, 75)
"""K, in the order in which a seed's runs are begun."""
ITERATIONS = 500
CHAINS = 256
CHAINS_FILE = "chains.json"
DIGITS = Judge("digits")
"""The classifier whose features the FID is taken of."""


@dataclass(frozen=True)
class Cell:
    """A run of the grid: K steps, or from K to `most`."""

    k: int
    most: int | None
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"k{self.k}{f'to{self.most}' if self.most else ''}_s{self.seed}"

    def command(self, folder: Path) -> Sequence[str]:
        """What runs it."""
        words = ["--data", "digits", "--beta-star", "0", "--seed", str(self.seed)]
        words += ["--iterations", str(ITERATIONS), "--sgld-steps", str(self.k)]
        random = ["--most-sgld-steps", str(self.most)] if self.most else []
        return train_command("shortrun", folder, *words, *random)


CELLS = [
    cell
    for seed in SEEDS
    for cell in (
        Cell(USUAL, None, seed),
        Cell(*RANDOM, seed),
        *(Cell(k, None, seed) for k in OTHERS),
    )
]


def chains(folder: Path) -> dict[str, float]:
    """How far apart the ends of chains are that differ in one thing; kept in the run folder.

    Root mean square over pixels, of K steps as in the training; the numbers differ from those of
    "plain" in one thing: f times a factor, no noise, other noise, or other starts and noise.
    """
    file = folder / CHAINS_FILE
    if not file.is_file():
        torch.set_num_threads(1)
        run = load_run(folder, torch.device("cpu"))
        rng = torch.Generator().manual_seed(0)

        def draw() -> tuple[Tensor, Tensor]:
            x0 = run.starts(CHAINS, rng)
            shape = (run.settings.sgld_steps, *x0.shape)
            return x0, torch.randn(shape, generator=rng)

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
        apart = {name: float((x - plain).square().mean().sqrt()) for name, x in ends.items()}
        write_json(file, apart)
    found: dict[str, float] = read_json(file)
    return found


def climb(run: TrainedRun, x0: Tensor, noise: Tensor, factor: float = 1.0) -> Tensor:
    """The training's chains on f times a factor."""
    settings = run.settings
    return sgld(
        run.network,
        x0,
        steps=len(noise),
        step_size=factor * settings.step_size,
        noise_std=settings.noise_std,
        noise=noise,
    )


def kind(cell: Cell) -> tuple[int, int]:
    """What the seeds of a line of the table have in common."""
    return cell.k, cell.most or 0


def words(cell: Cell) -> str:
    """K."""
    return f"{cell.k} to {cell.most}" if cell.most else str(cell.k)


def over_seeds(values: Sequence[float]) -> str:
    """The median, and what it is one of."""
    return f"{number(median(values))} ({', '.join(number(value) for value in values)})"


BY_STEPS = {
    "K": lambda own: words(own[0]["cell"]),
    "runs": lambda own: str(len(own)),
    "FID": lambda own: over_seeds([run["scores"]["samples"]["fid"] for run in own]),
    "IS": lambda own: number(median(run["scores"]["samples"]["is"] for run in own)),
    "gap": lambda own: over_seeds([run["median_last_100"]["energy_gap"] for run in own]),
    "diverged": lambda own: str(sum(run["diverged_at"] is not None for run in own)),
}


def page(root: Path) -> list[str]:
    """The lines of docs/results/shortrun_steps.md."""
    done = load(CELLS, root) if is_done(DIGITS, root) else []
    for run in done:
        run["scores"] = measure(root / run["cell"].name, root / DIGITS.name)
    kinds = sorted({kind(run["cell"]) for run in done})
    groups = [[run for run in done if kind(run["cell"]) == each] for each in kinds]
    fixed = [run for run in done if kind(run["cell"]) == (USUAL, 0)]
    apart = [{"seed": run["seed"], **chains(root / run["cell"].name)} for run in fixed]
    columns: dict[str, Any] = {
        name: (lambda each, name=name: number(each[name])) for name in (apart[0] if apart else ())
    }
    return [
        "# How many steps a short run needs",
        "",
        *GRID.source(root),
        f"Digits at β\\* = 0, {ITERATIONS:,} updates, else as `ebmguard train shortrun` has it; "
        "K Langevin steps from uniform noise, or a number that is drawn anew for each update. FID "
        "and Inception score are of 1,000 fresh samples by the features of a classifier trained "
        "here: comparable within this table alone. The gap is the median of the last 100 updates.",
        "",
        table(groups, BY_STEPS) if groups else "None yet.",
        "",
        "## What a chain's end depends on",
        "",
        f"{CHAINS} chains of K = {USUAL} steps on each of the models above. Root mean square "
        "distance of pixels, whose range is 2, to the chains on f with the same starts and the "
        "same noise, but for one thing.",
        "",
        table(apart, columns) if apart else "None yet.",
        "",
    ]


GRID = Grid(
    "shortrun_steps",
    CELLS,
    page,
    Path("docs/results/shortrun_steps.md"),
    Path("runs/bench-shortrun-steps"),
    judge=DIGITS,
)

if __name__ == "__main__":
    GRID.main()
