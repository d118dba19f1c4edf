"""Dying runs that are taken back: which remedy makes them healthy."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ebmguard.errors import BudgetSpentError
from ebmguard.recovery import Change, Recovery

from .families import Run
from .fates import LOST, fate_of, medians
from .judged import Recorded
from .record import traced
from .trainer import Trainer

__all__ = ["REMEDIES", "chosen_runs", "file_name", "take_back"]

HORIZON = 3
"""The step up to which a run goes on, in units of the time that it took to die."""
LEAST_STEPS = 300
"""That step at least."""


def _one(change: Change) -> dict[str, Any]:
    return {"recovery": Recovery(ladder=(change,))}


def _above(run: Run, to: float) -> Change:
    """To an exponent of this or half of the output scale, or twice what the run has."""
    own = to if run.beta_star < to else 2 * run.beta_star
    return Change(beta_star=min(own, (run.output_scale or math.inf) / 2))


REMEDIES: Mapping[str, Any] = {
    "ladder": lambda _: {"recovery": Recovery()},
    "new random numbers": lambda _: _one(Change()),
    "learning rate / 3": lambda _: _one(Change(lr=1 / 3)),
    "learning rate / 10": lambda _: _one(Change(lr=1 / 10)),
    "beta_star up": lambda run: _one(_above(run, 2.0)),
    "SGLD steps x 2": lambda _: _one(Change(sgld_steps=2.0)),
    "finer SGLD steps": lambda _: {"finer": 2, **_one(Change())},
    "gradient clipping": lambda _: {"clip": 0.1, **_one(Change())},
}
"""Options of a trainer by name; each rollback applies the one change again."""


def take_back(watched: Recorded, remedy: str, folder: Path) -> dict[str, Any]:
    """Train a run that died, with rollbacks, to three times the step; write what became of it.

    It is judged by the rows of its last course.
    """
    run, death = watched.run, watched.fate.death or 0
    torch.set_num_threads(1)
    began = time.perf_counter()
    trainer = Trainer(run, action="rollback", **REMEDIES[remedy](run))
    rows: list[dict[str, float]] = []
    ended = ""
    try:
        while trainer.guard.step < max(HORIZON * death, LEAST_STEPS):
            at = trainer.guard.step
            row = trainer.step()
            del rows[at:]
            if trainer.guard.step > at:
                rows.append(row)
            else:
                del rows[trainer.guard.step :]
    except BudgetSpentError as error:
        ended = type(error).__name__
    trainer.guard.close()
    # Such a run may have had no time to learn much, but is to get to where it had been.
    reached = float(medians(watched.trace["skill"][: death or None]).max())
    least = max(reached - LOST, float(watched.trace["skill"][0]) + LOST / 2)
    fate = fate_of(traced(rows), least, run.scale)
    found = {
        "run": run.name,
        "family": run.family,
        "remedy": remedy,
        "fate": "spent" if ended else fate.name,
        "best": fate.best,
        "last": fate.last,
        "steps": len(rows),
        "rollbacks": [each.record() for each in trainer.guard.rollbacks],
        "seconds": time.perf_counter() - began,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_name(run, remedy)).write_text(json.dumps(found))
    return found


def chosen_runs(runs: Sequence[Recorded], most: int) -> list[Recorded]:
    """Of each family, the dying runs that died first: they take least time."""
    dead = [run for run in runs if run.fate.death is not None]
    found: list[Recorded] = []
    for family in sorted({each.run.family for each in dead}):
        own = [each for each in dead if each.run.family == family]
        found += sorted(own, key=lambda each: each.fate.steps)[:most]
    return found


def file_name(run: Run, remedy: str) -> str:
    """Of what became of it."""
    return f"{run.name}-{remedy.replace(' ', '-').replace('/', 'by')}.json"
