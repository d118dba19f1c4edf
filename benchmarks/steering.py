"""Steering on digits: a sampler that has lost the data, and β* from both ends.

python -m benchmarks.steering                # all cells, two at a time
python -m benchmarks.steering --table-only   # the table of what has been run

"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ebmguard import Guard
from ebmguard.reference_training.jem import trainer as jem
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.judge.classification import accuracy_of
from ebmguard.steering import AdaptiveSteps

from .grid import Grid, Rows, number, percent, table_of

SEEDS = range(3)
LOST_AT = 300
"""From here on arms of a lost sampler are adaptive; GradScale has been 0 for hundreds of steps."""
ADAPTIVE = AdaptiveSteps()
SLOW = replace(ADAPTIVE, rise_after=5)
STRETCH = 50
Row = Mapping[str, Any]
COLUMNS = {
    "steps": "",
    "grad_scale": "grad_scale",
    "ess": "ess",
    "gap": "energy_gap",
    "beta_star": "beta_star",
}
"""What is kept of every step, and the tag that it has in the guard's row."""


@dataclass(frozen=True)
class Arm:
    """One way to run; what it starts with is the trainer's default otherwise.

    Attributes:
        adaptive: how the steps adapt; None: they do not.
        start: step from which they do.
        finer: whether additional steps are finer ones, or as long as the others.
    """

    title: str
    sgld_steps: int
    beta_star: float
    iterations: int = 2000
    adaptive: AdaptiveSteps | None = None
    start: int = 0
    finer: bool = True
    steer: bool = False


LOST = {
    "fixed": Arm("1 step, fixed", 1, 0.5),
    "adaptive": Arm("adaptive from step 0", 1, 0.5, adaptive=ADAPTIVE),
    "lost": Arm(f"adaptive from step {LOST_AT}", 1, 0.5, adaptive=ADAPTIVE, start=LOST_AT),
    "longer": Arm(f"from {LOST_AT}, steps not finer", 1, 0.5, 600, ADAPTIVE, LOST_AT, finer=False),
    "slow": Arm(f"from {LOST_AT}, 5 rows for a doubling", 1, 0.5, 600, SLOW, LOST_AT),
}
BETA = {
    f"{'steered' if steer else 'fixed'}{start:g}": Arm(
        f"{'from ' if steer else ''}{start:g}", 5, start, steer=steer
    )
    for start in (8.0, 0.1)
    for steer in (False, True)
}


CELLS = {
    f"{arm}_s{seed}": {"arm": arm, "seed": seed}
    for arms in (("fixed", "adaptive", "lost"), BETA, ("longer", "slow"))
    for seed in SEEDS
    for arm in arms
}


def measure(folder: Path, arm: str, seed: int) -> dict[str, Any]:
    """One cell, from its start: they take minutes."""
    way = (LOST | BETA)[arm]
    config = JemConfig(
        out=folder,
        beta_star=way.beta_star,
        sgld_steps=way.sgld_steps,
        seed=seed,
        iterations=way.iterations,
        steer_beta=way.steer,
    )
    data = config.load_data()
    network = jem.make_network(config, data)
    if not way.finer:
        asked = Guard.next_steps

        def not_finer(own: Guard) -> Any:
            return asked(own)._replace(refinement=1)

        Guard.next_steps = not_finer  # type: ignore[assignment, method-assign]
    if way.adaptive is not None:
        jem.AdaptiveSteps = lambda **_: way.adaptive
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    accuracy, alerts = [], []
    begun = time.process_time()
    trainer = jem.Trainer(config, network, data)
    for step in range(way.iterations):
        if way.adaptive is not None and step == way.start:
            adaptive = replace(config, most_steps=way.adaptive.most)
            before, alerts = trainer, trainer.loss_fn.guard.alerts
            trainer = jem.Trainer(adaptive, network, data)
            for own, was in ((trainer.parts, before.parts), (trainer.guards, before.guards)):
                for name, part in own.items():
                    part.load_state_dict(was[name].state_dict())
        if step % 25 == 0:
            accuracy.append([step, accuracy_of(network, data)])
        guard = trainer.loss_fn.guard
        columns["steps"].append(guard.sgld_steps)
        trainer.step(step)
        for name, tag in COLUMNS.items():
            if tag:
                columns[name].append(guard.last[tag])
    seconds = time.process_time() - begun
    accuracy.append([way.iterations, accuracy_of(network, data)])
    records = [alert.record() for alert in (*alerts, *trainer.loss_fn.guard.alerts)]
    return {**columns, "accuracy": accuracy, "alerts": records, "seconds": seconds}


def by_step(row: Row) -> pd.DataFrame:
    """A line for each step, with :data:`COLUMNS`."""
    return pd.DataFrame({name: row[name] for name in COLUMNS})


def lost_row(arm: Arm, row: Row) -> dict[str, str]:
    """A line of the table of lost samplers."""
    rows = by_step(row)
    scale, steps = rows["grad_scale"], rows["steps"]
    low = next(iter(scale.index[scale < 0.1]), None)
    # Over 0.5, and in the steps from there on the median too.
    ahead = scale[::-1].rolling(STRETCH, min_periods=1).median()[::-1]
    over = scale.index[(scale > 0.5) & (ahead > 0.5)]
    back = None if low is None else next(iter(over[over >= max(low, arm.start)]), None)
    return {
        "first under 0.1": number(low, ".0f"),
        "back over 0.5": number(back, ".0f"),
        "of the last 500 over 0.5": percent((scale[-500:] > 0.5).mean()),
        "final accuracy": percent(row["accuracy"][-1][1]),
        "SGLD steps per one of the base": f"{steps[arm.start :].mean() / arm.sgld_steps:.1f}",
    }


def slots(rows: Rows) -> dict[str, str]:
    lines = [
        {"arm": LOST[row["arm"]].title, "seed": str(row["seed"]), **lost_row(LOST[row["arm"]], row)}
        for name in LOST
        for row in rows
        if row["arm"] == name
    ]
    return {"lost": table_of(lines)}


GRID = Grid("steering", CELLS, measure, slots, trains_here=True)

if __name__ == "__main__":
    sys.exit(GRID.main())
