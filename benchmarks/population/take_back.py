"""Deaths of the population taken back by rollbacks, each to three times its step."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.grid import RESULTS
from ebmguard import BudgetSpentError

from .families import GROUPS, group_of
from .fates import fate_of
from .judged import load
from .record import traced
from .trainer import Trainer

TABLE = RESULTS / "taken_back.csv"
REMEDY = "ladder, finer steps first"
TIMES = 3


def taken_back(name: str, death: int) -> dict[str, Any]:
    """What became of a run with ``action="rollback"``; later attempts at a step count."""
    torch.set_num_threads(1)
    run = next(run for group in GROUPS for run in group_of(group) if run.name == name)
    trainer = Trainer(replace(run, steps=TIMES * death), action="rollback", substeps="auto")
    rows: dict[int, dict[str, float]] = {}
    fate = ""
    try:
        while (step := trainer.guard.step) < TIMES * death:
            rows[step] = trainer.step()
    except BudgetSpentError:
        fate = "spent"
    found = fate_of(traced([rows[step] for step in sorted(rows)]), scale=run.scale)
    rollbacks = trainer.guard.rollbacks
    trainer.guard.close()
    return {
        "run": name,
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
    deaths = {each.run.name: each.fate.death for group in GROUPS for each in load(group)}
    names = list(dict.fromkeys(known["run"]))
    with ProcessPoolExecutor(workers) as pool:
        rows = [*pool.map(taken_back, names, [deaths[name] for name in names])]
    new = pd.concat([known[known["remedy"] != REMEDY], pd.DataFrame(rows)])
    new.sort_values(["run", "remedy"]).to_csv(table, index=False)
    print(new.groupby(["remedy", "fate"]).size().unstack(fill_value=0).to_string())
