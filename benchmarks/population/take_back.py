"""Deaths of the population taken back by rollbacks: each to three times its step, at least 300."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.grid import RESULTS
from ebmguard import BudgetSpentError

from .families import GROUPS
from .fates import LOST, fate_of, medians
from .judged import Recorded, load
from .record import traced
from .trainer import Trainer

TABLE = RESULTS / "taken_back.csv"
REMEDY = "ladder, finer steps first"
TIMES, LEAST_STEPS = 3, 300


def taken_back(recorded: Recorded) -> dict[str, Any]:
    """What became of a run with ``action="rollback"``; later attempts at a step count."""
    torch.set_num_threads(1)
    run, death = recorded.run, recorded.fate.death
    assert death is not None
    steps = max(TIMES * death, LEAST_STEPS)
    trainer = Trainer(replace(run, steps=steps), action="rollback", substeps="auto")
    rows: dict[int, dict[str, float]] = {}
    fate = ""
    try:
        while (step := trainer.guard.step) < steps:
            rows[step] = trainer.step()
    except BudgetSpentError:
        fate = "spent"
    # Such a run may have had no time to learn much, but is to get to where it had been.
    reached = float(medians(recorded.skill[:death]).max())
    least = max(reached - LOST, float(recorded.trace["skill"][0]) + LOST / 2)
    found = fate_of(traced([rows[step] for step in sorted(rows)]), least, run.scale)
    rollbacks = trainer.guard.rollbacks
    trainer.guard.close()
    return {
        "run": run.name,
        "family": run.family,
        "remedy": REMEDY,
        "fate": fate or found.name,
        "best skill": round(found.best, 2),
        "last skill": round(found.last, 2),
        "rollbacks": len(rollbacks),
    }


def take_back(workers: int, table: Path = TABLE) -> None:
    """The rows of the shipped ladder in the table, for the runs that others were tried on."""
    known = pd.read_csv(table)
    runs = {each.run.name: each for group in GROUPS for each in load(group)}
    with ProcessPoolExecutor(workers) as pool:
        rows = [*pool.map(taken_back, [runs[name] for name in known["run"].unique()])]
    new = pd.concat([known[known["remedy"] != REMEDY], pd.DataFrame(rows)])
    new.sort_values(["run", "remedy"]).to_csv(table, index=False)
    print(new.groupby(["remedy", "fate"]).size().unstack(fill_value=0).to_string())
