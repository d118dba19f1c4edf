"""Which beta* does well where nobody has chosen one: fixed ones and rules, on the population.

python -m benchmarks.beta_star               # all cells, two at a time
python -m benchmarks.beta_star --table-only  # the tables of what has been run

"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .grid import Grid, Rows
from .population.families import Run, group_of
from .population.fates import Watch, fate_of
from .population.record import traced
from .population.trainer import Trainer

# Of each family the first run that dies at beta* = 0 within steps 20 to 120 (where none does, in
# others, or limps), and the first healthy one that learns within 150, where one does.
CHOSEN = {
    "digits-jem-mlp": (5, 6), "digits-jem-cnn-sgd": (4, 3), "digits-joint-cnn": (4,),
    "digits-noiseless": (1, 0), "mnist14-jem-cnn": (6, 5), "mnist14-ebm-short": (10, 7),
    "mnist28-jem-mlp": (0, 4), "mnist28-ebm-norm": (8, 0), "cifar16-jem-wrn": (2,),
    "cifar16-ebm-cnn": (9, 1), "toy-langevin": (14,), "toy-mala": (8, 0), "tabular-jem": (6, 1),
    "tabular-ebm-cd": (9,), "cifar12-joint-residual": (10,), "mnist14-ebm-annealed": (0, 1),
    "waves-gru": (11, 1), "digits-tiny-batch": (12, 10), "noise-levels": (0,),
    "latent-prior": (2, 3), "energy-scales": (0, 1), "cyclic-rates": (0, 4),
    "sets-lion": (13, 6), "penalised-mala": (1, 2),
}  # fmt: skip
LARGE = ("mnist14", "mnist28", "cifar16")
STEPS = {
    **dict.fromkeys(LARGE, 150),
    **dict.fromkeys(("digits", "waves"), 250),
    **dict.fromkeys(("mnist-latents", "sets"), 700),
}
"""At most, by data; 400 of others."""
RUNS = {
    run.name: run
    for group in ("first", "new", "last look")
    for run in group_of(group)
    if run.number in CHOSEN[run.family]
}
SEEDS = range(2)
AFTERMATH = 60
"""Steps that a broken run goes on for."""


@dataclasses.dataclass(frozen=True)
class Seeded(Run):
    """A run with another seed; at 0 its own."""

    again: int = 0

    @property
    def seed(self) -> int:
        return super().seed + self.again


class Sparing(Trainer):
    """One that looks at its skill at every fourth step."""

    def skill(self) -> float:
        if self.guard.step % 4 == 0:
            self._skill = super().skill()
        return self._skill


@dataclasses.dataclass
class Rule:
    """beta* from the rows: towards an effective sample size, or by the spread of energies.

    Attributes:
        value: beta* now, at first the starting one.
        least, most: its bounds.
        ess: the target of ESS as a share of the negatives; 1: beta* falls where nothing raises it.
        up, down: factors of one row.
        guarded: whether beta* rises, and never falls, while the spread of f on negatives grows by
            1.25 within 60 rows; and falls where no negative competes and it does not.
        per_spread: beta* is this, divided by that spread; 0: by ESS.
    """

    value: float
    least: float
    most: float
    ess: float = 0.5
    up: float = 1.02
    down: float = 1.005
    guarded: bool = True
    per_spread: float = 0.0

    def __post_init__(self) -> None:
        self.rows: deque[tuple[float, ...]] = deque(maxlen=60)
        self._bound(self.value)

    def _bound(self, value: float) -> None:
        self.value = max(min(value, self.most), min(self.least, self.most))

    def __call__(self, step: int) -> float:
        return self.value

    def observe(self, row: Mapping[str, float]) -> None:
        new = tuple(row.get(tag, math.nan) for tag in ("ess", "grad_scale", "f_neg/std"))
        if all(map(math.isfinite, new)) and self.least < self.most:
            self.rows.append(new)
            last = [statistics.median(each) for each in zip(*[*self.rows][-10:], strict=True)]
            if self.per_spread:
                self._bound(self.per_spread / (last[2] or 1.0))
            else:
                self._bound(self.value * self._factor(*last))

    def _factor(self, ess: float, scale: float, spread: float) -> float:
        before = statistics.median([row[2] for row in self.rows][:20])
        grows = self.guarded and len(self.rows) >= 30 and spread > 1.25 * before
        if self.guarded and scale < 0.5:
            return 1.0 if grows else 1 / self.down
        if grows or ess > 1.1 * self.ess:
            return self.up
        return 1 / self.down if ess < self.ess / 1.1 else 1.0


FIXED = {"4": 4.0, "2": 2.0, "0.5": 0.5, "8": 8.0, "0": 0.0, "1": 1.0}
RULES: dict[str, dict[str, Any]] = {
    "4, more while f spreads": {"value": 4.0, "least": 4.0, "most": 16.0, "ess": 1.0},
    "to ESS 0.5, up while f spreads": {"value": 0.5, "least": 0.02, "most": 10.0},
    "ESS 0.5": {"value": 0.5, "least": 0.02, "most": 10.0, "down": 1.02, "guarded": False},
    "2 / spread": {"value": 0.5, "least": 0.02, "most": 10.0, "per_spread": 2.0},
}
FRESH = "4, 0.2 from noise"
"""As 4, but 0.2 where each chain begins anew from noise."""
ARMS = [*FIXED, *RULES, FRESH]
FIRST = ["4", "2", "0.5", "4, more while f spreads", "8", FRESH]


def _turn(name: str, seed: int) -> int:
    """When a run has its turn: small data first, of the larger what dies, then again."""
    run = RUNS[name]
    is_second = run.data in LARGE and run.number != CHOSEN[run.family][0]
    return 2 * seed + (run.data in LARGE) + 2 * is_second


CELLS = {
    f"{name}_{ARMS.index(arm)}_s{seed}": {"run": name, "arm": arm, "seed": seed}
    for arms in (FIRST, ARMS)
    for turn in range(6)
    for seed in SEEDS
    for arm in arms
    for name, run in RUNS.items()
    if (arm != FRESH or run.sampler == "short") and _turn(name, seed) == turn
}


def rule_of(arm: str, run: Run) -> Rule:
    """beta* of an arm, at most half of the output scale where the sampler has one."""
    cap = (run.output_scale or math.inf) / 2
    if arm in RULES:
        own = RULES[arm]
        return Rule(**own | {"most": min(own["most"], cap)})
    fixed = min(FIXED.get(arm, 0.2), cap)
    return Rule(fixed, fixed, fixed)


def measure(folder: Path, run: str, arm: str, seed: int) -> dict[str, Any]:
    """One cell: a run, as far as it goes."""
    del folder
    own = Seeded(**dataclasses.asdict(RUNS[run]), again=seed)
    rule = rule_of(arm, own)
    trainer = Sparing(own, beta_star=rule if rule.least < rule.most else rule.value)
    watch, rows, bounds = Watch(own.scale), [], 0
    for step in range(STEPS.get(own.data, 400)):
        bounds += rule.value in (rule.least, rule.most)
        rows.append(trainer.step())
        rule.observe(rows[-1])
        since = watch.take(rows[-1]["energy_gap"], rows[-1]["f_pos/std"])
        if since is not None and step - since >= AFTERMATH:
            break
    trainer.guard.close()
    trace = traced(rows)
    fate = fate_of(trace, scale=own.scale)
    kinds = ("ess", "grad_scale") if rows[0]["beta_star"] else ("ref/ess", "ref/grad_scale")
    return {
        "fate": fate.name,
        "death": fate.death,
        "best": round(fate.best, 2),
        "last": round(fate.last, 2),
        "steps": len(rows),
        "ess": float(np.median(trace[kinds[0]][-50:])),
        "grad_scale": float(np.median(trace[kinds[1]][-50:])),
        "gap": float(np.median(trace["energy_gap"][-50:])),
        "beta_star": float(np.median(trace["beta_star"][-50:])),
        "at_bounds": round(bounds / len(rows), 3),
    }


def slots(rows: Rows) -> dict[str, str]:
    return {"arms": str(len(rows))}


GRID = Grid("beta_star", CELLS, measure, slots, trains_here=True)

if __name__ == "__main__":
    sys.exit(GRID.main())
