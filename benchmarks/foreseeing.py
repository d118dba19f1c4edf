"""Can a lost run be foreseen? Futures of saved states with other random numbers, and what tells.

    python -m benchmarks.foreseeing                # the runs that are not done, then the page
    python -m benchmarks.foreseeing --table-only   # the page from the rows that are kept

A run is saved again and again; each saved state goes on five times with other random numbers. What
is known of the state beforehand is judged by the share of its futures that are lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .cells import Grid, cell_command, write_json
from .futures import LAST, features_of, futures, is_lost, saved
from .population.families import Run, population
from .population.trainer import Trainer

EVERY = 5
"""Steps between the states that are kept until a run's end is known."""
LEADS = (10, 25, 40, 60, 75, 90, 120, 150, 200, 300)
"""Steps before a run's end at which its states are judged."""


@dataclass(frozen=True)
class Cell:
    """One run of the population, with what is judged of it.

    Attributes:
        family, number: which run.
        lives: it was healthy to its end, and is trained no longer than to `end`.
        end: the step at which it, or the run that stands before it, was lost when it was recorded.
    """

    family: str
    number: int
    lives: bool
    end: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.family}-{self.number:02d}"

    def command(self, folder: Path) -> Sequence[str]:
        """What runs it."""
        return cell_command("foreseeing", folder)


# Of two families, with batches of 64 at most: the first five runs that were lost at step 150 or
# later, and the first five healthy ones, as docs/results/population.md has them; chosen before any
# feature was seen. Each healthy one is judged at the steps of the one before it.
PAIRS = {
    "digits-jem-mlp": ((0, 4, 749), (2, 6, 164), (9, 7, 277), (13, 10, 275), (14, 11, 1020)),
    "digits-noiseless": ((4, 0, 207), (7, 2, 169), (8, 3, 343), (9, 5, 532), (11, 6, 279)),
}
CELLS = [  # the shortest first
    Cell(family, number, lives, pair[2])
    for family, pair in sorted(
        ((family, pair) for family, pairs in PAIRS.items() for pair in pairs),
        key=lambda each: each[1][2],
    )
    for number, lives in zip(pair[:2], (False, True), strict=True)
]


def settings(cell: Cell) -> Run:
    """The run of a cell."""
    return next(run for run in population() if run.name == cell.name)


def run(cell: Cell, root: Path) -> None:
    """Run a cell, and write what came of it."""
    torch.set_num_threads(1)
    logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
    began = time.process_time()
    trainer = Trainer(settings(cell))
    states, rows, died = course(trainer, cell)
    trainer.guard.close()
    trained = time.process_time()
    end = cell.end if died is None else died
    judged = []
    for step in sorted({(end - lead) // EVERY * EVERY for lead in LEADS}):
        if step not in states or step < LAST:
            continue
        features = features_of(trainer, states[step], rows[:step])
        deaths = futures(trainer, states[step])
        judged.append({"step": step, "deaths": deaths, "features": features})
        print(step, deaths, flush=True)
    result = {
        "died": died,
        "steps": len(rows),
        "snapshots": judged,
        "cpu_seconds_of_run": trained - began,
        "cpu_seconds": time.process_time() - began,
    }
    (root / cell.name).mkdir(parents=True, exist_ok=True)
    write_json(root / cell.name / "result.json", result)


def course(trainer: Trainer, cell: Cell) -> tuple[dict[int, Any], list[dict[str, float]], Any]:
    """The states before every few steps, the rows, and the step at which the run was lost."""
    states: dict[int, Any] = {}
    rows: list[dict[str, float]] = []
    for step in range(cell.end if cell.lives else trainer.run.steps):
        if step % EVERY == 0:
            states[step] = saved(trainer)
        rows.append(trainer.step())
        if is_lost(rows[-1]["energy_gap"]):
            return states, rows, step
    return states, rows, None


def page(root: Path) -> list[str]:
    """The lines of docs/results/foreseeing.md."""
    return [f"# Can a lost run be foreseen? {root}", ""]


GRID = Grid(
    "foreseeing",
    CELLS,
    page,
    Path("docs/results/foreseeing.md"),
    Path("runs/bench-foreseeing"),
    run,
)

if __name__ == "__main__":
    GRID.main()
