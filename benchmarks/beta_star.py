"""Which beta* does well where nobody has chosen one: fixed ones and rules, on the population.

python -m benchmarks.beta_star               # all cells, two at a time
python -m benchmarks.beta_star --table-only  # the tables of what has been run

Superseded by :mod:`.defaults`, which has these settings and other arms: no rule beat a fixed beta*,
and finer steps were unknown then.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .grid import Grid, Rows, rate, table_of
from .population.families import LAST_LOOK, Run, group_of
from .population.fates import fate_of
from .population.record import traced, watched
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


class Rule:
    """beta* from the medians of ten rows, by a factor a row, between its bounds."""

    def __init__(self, arm: str, cap: float) -> None:
        self.follow: Callable[..., float]
        start, least, most, self.follow = RULES[arm]
        self.least, self.most = min(least, cap), min(most, cap)
        self.value: float = min(start, cap)
        self.rows: deque[tuple[float, ...]] = deque(maxlen=60)

    def __call__(self, step: int) -> float:
        return self.value

    def observe(self, row: Mapping[str, float]) -> None:
        new = tuple(row.get(tag, math.nan) for tag in ("ess", "grad_scale", "f_neg/std"))
        if all(map(math.isfinite, new)):
            self.rows.append(new)
            ess, scale, spread = map(statistics.median, zip(*[*self.rows][-10:], strict=True))
            before = statistics.median([own[2] for own in self.rows][:20])
            grows = len(self.rows) >= 30 and spread > 1.25 * before
            wanted = self.value * self.follow(self.value * spread, ess, scale, grows)
            self.value = min(max(wanted, self.least), self.most)


def to_ess(target: float, ess: float) -> float:
    """The factor that brings ESS nearer to a share of the negatives."""
    return 1.02 if ess > 1.1 * target else 1 / 1.005 if ess < target / 1.1 else 1.0


def guarded(target: float, ess: float, scale: float, *, grows: bool) -> float:
    """The same, but up while energies run away: the brake is pulled, and not let go.

    Where no negative competes, it holds while they grow, and falls else.
    """
    if scale < 0.5:
        return 1.0 if grows else 1 / 1.005
    return 1.02 if grows else to_ess(target, ess)


RULES: dict[str, tuple[Any, ...]] = {  # the start, bounds, and the factor of a row
    "growing": (4.0, 4.0, 16.0, lambda _, ess, scale, grows: guarded(1, ess, scale, grows=grows)),
    "guarded": (0.5, 0.02, 10, lambda _, ess, scale, grows: guarded(0.5, ess, scale, grows=grows)),
    "ess": (0.5, 0.02, 10.0, lambda _, ess, *__: to_ess(0.5, ess)),
    "spread": (0.5, 0.02, 10.0, lambda spreads, *_: 2 / spreads if spreads else 1.0),
}
FIXED = {"4": 4.0, "2": 2.0, "0.5": 0.5, "8": 8.0, "0": 0.0, "1": 1.0}
ARMS = {each: each for each in FIXED} | {
    "fresh": "4, but 0.2 from noise",
    "growing": "4, more while f spreads",
    "guarded": "to ESS 0.5, more while f spreads",
    "ess": "to ESS 0.5",
    "spread": "2 / spread of f",
}
CELLS = {
    f"{name}_{arm}_s{seed}": {"run": name, "arm": arm, "seed": seed}
    for seed in SEEDS
    for arm in ARMS
    for name, run in RUNS.items()
    if arm != "fresh" or run.sampler == "short"
}


def measure(folder: Path, run: str, arm: str, seed: int) -> dict[str, Any]:
    """One cell: a run, as far as it goes, its beta* at most half of the output scale."""
    del folder
    own = Seeded(**dataclasses.asdict(RUNS[run]), again=seed)
    cap = (own.output_scale or math.inf) / 2
    rule = Rule(arm, cap) if arm in RULES else None
    trainer = Sparing(own, beta_star=rule or min(FIXED.get(arm, 0.2), cap))
    rows = []
    for row in itertools.islice(watched(trainer, AFTERMATH), STEPS.get(own.data, 400)):
        rows.append(row)
        if rule is not None:
            rule.observe(row)
    trainer.guard.close()
    trace = traced(rows)
    fate = fate_of(trace, scale=own.scale)
    ref = "" if rows[0]["beta_star"] else "ref/"
    late = {tag: float(np.median(trace[ref + tag][-50:])) for tag in ("ess", "grad_scale")}
    late |= {tag: float(np.median(trace[tag][-50:])) for tag in ("energy_gap", "beta_star")}
    known = {"fate": fate.name, "death": fate.death, "steps": len(rows)}
    ends = np.array([rule.least, rule.most] if rule else rows[0]["beta_star"], np.float32)
    at_bounds = float(np.isin(trace["beta_star"], ends).mean())
    return known | late | {"last": round(fate.last, 2), "at_bounds": round(at_bounds, 3)}


def by_cell(rows: Rows) -> pd.DataFrame:
    """A line for each cell; "fresh" has those of 4 where no chain begins anew."""
    frame = pd.DataFrame(rows)
    frame["family"] = frame["run"].map(lambda name: RUNS[name].family)
    frame["is_lost"] = frame["fate"].isin(["dead", "collapsed"])
    fresh = set(frame.loc[frame["arm"] == "fresh", "run"])
    others = frame[(frame["arm"] == "4") & ~frame["run"].isin(fresh)]
    frame = pd.concat([frame, others.assign(arm="fresh")], ignore_index=True)
    # Of the skill at the end, against that of the fixed beta* that is best in its setting.
    means = frame.groupby(["run", "arm"])["last"].mean().unstack()
    frame["regret"] = frame["run"].map(means[list(FIXED)].max(axis=1)) - frame["last"]
    return frame


def of_arm(arm: str, frame: pd.DataFrame) -> dict[str, str]:
    """A line of the table of arms."""
    own, of_2 = (frame[frame["arm"] == each].set_index(["run", "seed"]) for each in (arm, "2"))
    lost, counts = own["is_lost"], own["fate"].value_counts()
    lost_at_2 = of_2["is_lost"].reindex(own.index)
    regret = own[~lost].groupby("family")["regret"].mean().to_numpy()
    rng = np.random.default_rng(0)
    drawn = rng.choice(regret, (2000, len(regret))).mean(1)
    worst, best = np.quantile(drawn, [0.975, 0.025])
    worse, better = int((lost & ~lost_at_2).sum()), int((~lost & lost_at_2).sum())
    return {
        "β*, at most o/2": ARMS[arm],
        "lost": rate(int(lost.sum()), len(own)),
        "limping": str(counts.get("limping", 0)),
        "healthy": str(counts.get("healthy", 0)),
        "lost where 2 lives, lives where 2 is lost": f"{worse}, {better}",
        "regret, points": f"{regret.mean():.1f} ({best:.1f} to {worst:.1f})",
        "GradScale": f"{own['grad_scale'].median():.2f}",
        "ESS": f"{own['ess'].median():.2f}",
        "ESS < 0.1, of the healthy": str(((own["ess"] < 0.1) & (own["fate"] == "healthy")).sum()),
    }


def slots(rows: Rows) -> dict[str, str]:
    frame = by_cell(rows)
    is_last = frame["family"].isin(LAST_LOOK)
    parts = {"arms": frame[~is_last], "last-look": frame[is_last]}
    return {name: table_of([of_arm(arm, own) for arm in ARMS]) for name, own in parts.items()}


GRID = Grid("beta_star", CELLS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
