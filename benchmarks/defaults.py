"""What guard() should do where nobody has told it: β*, finer steps once needed, rollback.

python -m benchmarks.defaults                # all runs, two at a time
python -m benchmarks.defaults --table-only   # the page of what has been run

It takes the place of the rules and arms of :mod:`.beta_star`, whose settings it has. The rule by
which it decides is on its page, and was written before any run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ebmguard import BudgetSpentError, Level
from ebmguard.reference_training.engine.run_folder import read_json

from . import beta_star, discrete, why_lost
from . import default_rule as rule
from .beta_star import RUNS, Seeded, Sparing
from .grid import Grid, Rows, number, rate, table_of
from .population.families import Run
from .population.fates import fate_of
from .population.networks import Energy
from .population.record import watched
from .population.trainer import SKILL
from .why_lost import FINER, NETWORKS, TAGS

MOST = 2.0
CAPPED = "min(2, o/2)"
LATE = "the same, where 16 times finer steps are too long"
SHIPPED = "shipped"
ARMS: dict[str, dict[str, Any]] = {
    "a": {"beta_star": 0.0, "substeps": 1},
    "b": {"beta_star": CAPPED, "substeps": 1},
    "c": {"beta_star": 0.0, "substeps": "auto"},
    "d": {"beta_star": CAPPED, "substeps": "auto"},
    "e": {"beta_star": LATE, "substeps": "auto"},
    "f": {"beta_star": 0.0, "substeps": "auto", "action": "rollback"},
    "g": {"beta_star": 0.0, "substeps": 1},
    SHIPPED: {},
}
"""Options of the guard; "g" has finer steps in the sampler's own settings."""
NAMES = {
    "a": "nothing",
    "b": "β* always",
    "c": "finer when needed",
    "d": "finer when needed, β* always",
    "e": "finer when needed, then β*",
    "f": "finer when needed, rollback",
    "g": f"{FINER} times finer always",
    SHIPPED: "guard() as shipped",
}
DISCRETE: dict[str, tuple[Callable[..., discrete.Trained], float]] = {
    "RBM, 0.1": (discrete.train_machine, 0.1),
    "RBM, 0.03": (discrete.train_machine, 0.03),
    "bits, 0.001": (discrete.train_network, 0.001),
    "bits, 0.01": (discrete.train_network, 0.01),
}
"""With their learning rates."""
LENGTHS = {150: 300, 250: 500}
"""Of runs that were short in beta_star."""
ALL_ARMS = 5
"""Seeds of the networks on which all arms are run; on the others, c and f."""
KEPT, FRESH, FRESH_STEPS = 1000, 256, 200
PARTS = {"e": "late", "f": "error"}
"""What the row of "c" calls the update at which an arm parts from it; before it they are one."""
SHARPNESS, SUBSTEPS, FINEST = "sampler/sharpness", "sampler/substeps", 16


def cells_of(seed: int) -> Iterable[tuple[str, str]]:
    """What is run with a seed: all arms of a setting, and then the next one."""
    few = seed in beta_star.SEEDS
    yield from itertools.product(RUNS if few else (), "abcdefg")
    yield from itertools.product(DISCRETE if few else (), ("a", "b", "c", "f", SHIPPED))
    yield from itertools.product(NETWORKS, "abcdefg" if seed < ALL_ARMS else "cf")


CELLS = {
    f"{setting.replace(', ', '-')}_{arm}_s{seed}": {"setting": setting, "arm": arm, "seed": seed}
    for seed in why_lost.SEEDS
    for setting, arm in cells_of(seed)
}


class Distance:
    """Fréchet's, of Gaussians, from samples to held-out data; the training data's own is 1."""

    def __init__(self, train: Tensor, held_out: Tensor) -> None:
        x = train.flatten(1).double()
        self.axes = torch.eye(x.shape[1], dtype=x.dtype)
        if x.shape[1] > 20:
            self.axes = torch.linalg.svd(x - x.mean(0), full_matrices=False)[2][:20].T
        self.held_out = self.moments(held_out)
        self.unit = frechet(self.moments(train), self.held_out)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = x.flatten(1).double() @ self.axes
        return z.mean(0), torch.cov(z.T)

    def __call__(self, x: Tensor) -> float | None:
        """None of samples that are not finite."""
        known = bool(torch.isfinite(x).all())
        return frechet(self.moments(x), self.held_out) / self.unit if known else None


def frechet(p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> float:
    """The squared distance of two normal densities, given as mean and covariance."""
    values, axes = torch.linalg.eigh(p[1])
    root = axes * values.clamp(min=0).sqrt() @ axes.T
    common = torch.linalg.eigvalsh(root @ q[1] @ root).clamp(min=0).sqrt().sum()
    return float((p[0] - q[0]).square().sum() + p[1].trace() + q[1].trace() - 2 * common)


class Late:
    """β* that is 0 until the finest steps are too long, by the rows that it is shown.

    Attributes:
        since: how many rows it took; None as long as it is 0.
    """

    def __init__(self, most: float) -> None:
        self.most, self.since = most, cast("int | None", None)
        self.rows, self.seen = 0, deque[float](maxlen=5)

    def __call__(self, step: int) -> float:
        return 0.0 if self.since is None else self.most

    def observe(self, row: Mapping[str, float]) -> None:
        self.rows += 1
        is_finest = row.get(SUBSTEPS, 1) >= FINEST
        self.seen.append(row.get(SHARPNESS, math.nan) if is_finest else math.nan)
        if self.since is None and len(self.seen) == 5 and np.median(self.seen) > 1:  # NaN is not
            self.since = self.rows


class Kept(Sparing):
    """One that keeps its last negatives."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.drawn: deque[Tensor] = deque(maxlen=math.ceil(KEPT / run.batch))
        super().__init__(run, **options)

    def draw(self, f: Energy, data: Tensor, y: Tensor | None, steps: int) -> Tensor:
        found = super().draw(f, data, y, steps)
        self.drawn.append(found)
        return found

    def samples(self) -> Tensor:
        """The buffer, or the last negatives; of noise levels the lowest."""
        if self.buffer is None:
            return torch.cat([*self.drawn])[-KEPT:]
        return self.buffer.samples[: KEPT // (self.run.levels or 1)]

    def fresh(self, run: Run) -> Tensor:
        """Where untempered chains of the settings of a run are that begin now."""
        self.run, self.step_size = run, run.step_size / run.scale
        if self.buffer is not None:
            self.buffer.reinit_rate = 1.0
        rows = torch.arange(FRESH) % len(self.data.x)
        y = self.data.y[rows] if run.task == "joint" else None
        y = y * 0 if y is not None and run.levels else y
        return self.draw(self.network, self.data.x[rows], y, FRESH_STEPS)


def options_of(arm: str, most: float) -> dict[str, Any]:
    """Of the guard, with β* at its most."""
    stars = {CAPPED: most, LATE: Late(most)}
    own = {name: stars.get(x, x) for name, x in ARMS[arm].items()}
    return own if arm == SHIPPED else {"action": "warn", **own}


def measure(folder: Path, setting: str, arm: str, seed: int) -> dict[str, Any]:
    """Train until the run has its length, or has been broken for a while.

    What never parts from arm "c", where that has been measured here, is no other run.
    """
    if arm in PARTS and setting not in DISCRETE:
        of_c = folder.with_name(folder.name.replace(f"_{arm}_s", "_c_s") + ".json")
        row = read_json(of_c) if of_c.is_file() else {}
        if PARTS[arm] in row and row[PARTS[arm]] is None:
            return row
    if setting in DISCRETE:
        return measure_discrete(setting, arm, seed)
    if setting in NETWORKS:
        told = {"sgld_steps": why_lost.STEPS, **NETWORKS[setting], "steps": why_lost.UPDATES}
        run: Run = Seeded("why-lost", seed, "digits", **told)
        updates, aftermath = run.steps, why_lost.AFTER
    else:
        run = Seeded(**dataclasses.asdict(RUNS[setting]), again=seed)
        updates, aftermath = beta_star.STEPS.get(run.data, 400), beta_star.AFTERMATH
        updates = LENGTHS.get(updates, updates)
    own = run
    if arm == "g":
        sizes = {"step_size": run.step_size / FINER, "noise_std": run.noise_std / FINER**0.5}
        own = dataclasses.replace(run, sgld_steps=FINER * run.sgld_steps, **sizes)
    options = options_of(arm, min(MOST, (run.output_scale or math.inf) / 2))
    trainer, star = Kept(own, **options), options["beta_star"]
    late = star if isinstance(star, Late) else Late(0.0)
    begun, rows, is_ended = time.process_time(), [], False
    try:
        for row in itertools.islice(watched(trainer, aftermath), updates):
            rows.append(row)
            late.observe(row)
    except BudgetSpentError:  # the guard calls the run lost, and has no rollback left
        is_ended = True
    trainer.guard.close()
    seconds = time.process_time() - begun
    known = fate(rows, run.scale)
    known |= {"fate": "dead", "death": len(rows)} if is_ended and known["death"] is None else {}
    known |= acted(rows, own.sgld_steps) | {"parameters": bits(trainer.network)}
    errors = [alert.step for alert in trainer.guard.alerts if alert.level is Level.ERROR]
    known |= {"late": late.since, "error": min(errors, default=None)}
    distance = Distance(trainer.data.x, trainer.data.held_out)
    known |= {"rollbacks": len(trainer.guard.rollbacks), "buffer": distance(trainer.samples())}
    return known | {"fresh": distance(trainer.fresh(run)), "seconds": seconds}


def measure_discrete(setting: str, arm: str, seed: int) -> dict[str, Any]:
    """The same of bits; a machine's loss is told beside arm a."""
    (train, lr), begun = DISCRETE[setting], time.process_time()
    trained = train(lr, seed, **options_of(arm, 0.5))
    seconds, rows = time.process_time() - begun, trained.rows
    known = fate(rows)
    if setting.startswith("RBM"):
        errors = [row[SKILL] for row in rows]
        known = {"fate": "healthy", "death": None, "best": min(errors), "last": errors[-1]}
    known |= acted(rows, 0) | {"parameters": bits(trained.network)}
    distance = Distance(trained.train, trained.held_out)
    known |= {"rollbacks": len(trained.guard.rollbacks), "buffer": distance(trained.samples)}
    return known | {"fresh": distance(trained.fresh(FRESH, FRESH_STEPS)), "seconds": seconds}


def fate(rows: Rows, scale: float = 1.0) -> dict[str, Any]:
    """What became of a run."""
    trace = {tag: np.array([row.get(tag, math.nan) for row in rows]) for tag in TAGS}
    found = fate_of(trace, scale=scale)
    return {"fate": found.name, "death": found.death, "best": found.best, "last": found.last}


def acted(rows: Rows, steps: int) -> dict[str, Any]:
    """What a run cost, and the first rows at which anything was done about it."""

    def first(tag: str, least: float) -> int | None:
        return next((i for i, row in enumerate(rows) if row.get(tag, 0) > least), None)

    taken = [row.get("sampler/evaluations", math.nan) for row in rows]
    chain = [
        (steps if math.isnan(x) else x) * row.get(SUBSTEPS, 1)
        for x, row in zip(taken, rows, strict=True)
    ]
    acts = {"finer": first(SUBSTEPS, 1), "tempered": first("beta_star", 0)}
    return {"updates": len(rows), "gradients": float(np.mean(chain)) + 2, **acts}


def bits(network: nn.Module) -> str:
    """The hash of the parameters."""
    parts = (p.detach().numpy().tobytes() for p in network.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def frame_of(rows: Rows) -> pd.DataFrame:
    """The rows, with what follows from other cells."""
    frame = pd.DataFrame(rows)
    of_a = frame[frame["arm"] == "a"].set_index(["setting", "seed"])
    keys = pd.MultiIndex.from_frame(frame[["setting", "seed"]])
    last, same = of_a["last"].reindex(keys), of_a["parameters"].reindex(keys)
    rebuilds = frame["setting"].str.startswith("RBM")
    frame.loc[rebuilds & ~(frame["last"] <= 2 * last.to_numpy()), "fate"] = "dead"
    is_told = ~rebuilds | same.notna().to_numpy()  # others wait for arm a
    parts = dict.fromkeys(RUNS, rule.SETTINGS) | dict.fromkeys(DISCRETE, rule.BITS)
    frame["part"] = frame["setting"].map(parts).fillna(rule.OTHERS)
    frame["lost"] = frame["fate"].isin(["dead", "collapsed"])
    frame["healthy"] = frame["fate"] == "healthy"
    acts = frame["finer"].notna() | frame["tempered"].notna() | (frame["rollbacks"] > 0)
    frame["idle"] = ~acts & ~frame["arm"].isin(["a", "g"])
    differs = same.notna().to_numpy() & (frame["parameters"] != same.to_numpy())
    frame["other_bits"] = frame["idle"] & differs
    return frame[is_told]


def of_arms(own: pd.DataFrame) -> list[dict[str, str]]:
    """The lines of the arms."""
    near, near_else = rule.distances(own, "buffer")
    fresh, fresh_else = rule.distances(own, "fresh")
    cost, lines = rule.compute(own), []
    for arm, each in own.groupby("arm"):
        more, less = rule.pairs(own, str(arm), "a")
        lines.append(
            {
                "arm": f"{arm}: {NAMES[str(arm)]}",
                "lost": rate(int(each["lost"].sum()), len(each)),
                "limping": str((each["fate"] == "limping").sum()),
                "lost or limping": str((~each["healthy"]).sum()),
                "healthy where a is not, the reverse": f"{more}, {less}",
                "lost where a is healthy": str(rule.harmed(own, str(arm))),
                "buffer, × a's": number(near[arm]),
                "where a has none": number(near_else[arm]),
                "fresh, × a's": number(fresh[arm]),
                "fresh, where a has none": number(fresh_else[arm]),
                "gradients, × a's": number(cost[arm]),
                "never acted": str(each["idle"].sum()),
                "with other bits": str(each["other_bits"].sum()),
            }
        )
    return lines


def of_parts(own: pd.DataFrame) -> list[dict[str, str]]:
    """A line for each arm in each part; medians, of distances over runs that are not lost."""
    lines = []
    of = own["setting"].where(own["part"] != rule.SETTINGS, rule.SETTINGS)
    for (part, arm), each in own.groupby([of, "arm"], sort=False):
        counts = [each["lost"].sum(), (each["fate"] == "limping").sum(), each["healthy"].sum()]
        alive = each[~each["lost"]]
        middle = {name: each[name].median() for name in ("death", "best", "last")}
        lines.append(
            {
                "part": str(part),
                "arm": str(arm),
                "lost, limping, healthy": ", ".join(map(str, counts)),
                "update of the loss": number(middle["death"], ".0f"),
                "skill: best, last": f"{number(middle['best'])}, {number(middle['last'])}",
                "buffer": number(alive["buffer"].median()),
                "fresh": number(alive["fresh"].median()),
                "gradients": number(each["gradients"].median()),
                "finer": str(each["finer"].notna().sum()),
                "rollbacks": str(each["rollbacks"].sum()),
            }
        )
    return lines


def merged(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """Lines of discrete runs, without gradients: a part shares them. Equal arms share a line."""
    shared: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        kept = {name: x for name, x in line.items() if name not in ("gradients", "finer")}
        first = shared.setdefault(tuple(x for name, x in kept.items() if name != "arm"), kept)
        if first is not kept:
            first["arm"] += f", {line['arm']}"
    return [*shared.values()]


def slots(rows: Rows) -> dict[str, str]:
    frame = frame_of(rows)
    bits = frame["part"] == rule.BITS
    told = f"Not decided before all runs are done: {len(rows)} of {len(CELLS)}."
    shared = rule.shared(frame)
    if len(rows) == len(CELLS):
        arm = rule.chosen(shared)
        why = "; ".join(rule.objections(shared, arm))
        told = f"The rule chooses {arm}, {NAMES[arm]}"
        told += f", but decides nothing: {why}." if why else "."
    return {
        "decision": told,
        "arms": table_of([] if bits.all() else of_arms(shared[shared["part"] != rule.BITS])),
        "parts": table_of(of_parts(frame[~bits]), words=2),
        "discrete": table_of(merged(of_parts(frame[bits])), words=2),
    }


GRID = Grid("defaults", CELLS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
