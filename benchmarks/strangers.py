"""Kinds of runs on which no number of the guard was chosen: what its defaults make of them.

    python -m benchmarks.strangers                # all cells, two at a time
    python -m benchmarks.strangers --table-only   # the page of what has been run

The settings were chosen by the fate of the unguarded run alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebmguard import BudgetSpentError, DivergenceError, guard
from ebmguard.reference_training.plots.numbers import NONE

from .grid import Grid, Rows, number, table, table_of
from .population.fates import Watch, fate_of
from .population.trainer import SKILL
from .strange_kinds import KINDS, Classifier, latent

HELD_OUT, BUFFER, FINER = 400, 1000, 4
AFTER = 100
"""Updates for which a run is broken before it is given up."""
LATE = 16
"""Updates at the end whose samples are compared with the data."""
SPARING = 4
"""Updates from one look at the skill to the next."""
UPDATES, LEAST = 500, 300
"""Of a healthy setting; and of one that dies at least, or LONGER times as many as it lives."""
LONGER = 3
TRAINED = 90.0
"""The accuracy that keeps a classifier that was trained before healthy."""
TAGS = ("sampler/sharpness", "sampler/substeps", "sampler/evaluations")

OFF: dict[str, Any] = {"substeps": 1, "action": "warn"}
"""What else keeps the guard from acting."""
ARMS: dict[str, dict[str, Any] | None] = {  # of the guard; None is no guard at all
    "unguarded": None,
    "nothing": {"beta_star": 0.0, **OFF},
    "default": {},
    "rollback": {"action": "rollback"},
    "finer": None,
}
LABELS = {
    "unguarded": "no guard",
    "nothing": "guard, β* = 0, no substeps",
    "default": "guard(None, sampler)",
    "rollback": 'guard, action="rollback"',
    "finer": f"no guard, steps {FINER} times finer",
}

# Learning rates of runs that die unguarded, with the update of the death.
DYING: dict[str, dict[float, int]] = {
    "transformer": {0.03: 245, 0.06: 154},
    "LSTM": {0.01: 383, 0.05: 65, 0.1: 85},
    "graph": {0.085: 5},
    "point cloud": {0.003: 98, 0.005: 70},
    "regression": {0.01: 658, 0.02: 261, 0.03: 224},
    "Fourier": {0.003: 511, 0.01: 136, 0.03: 66},
    "clusters": {0.1: 405, 0.2: 9},
    "Lion": {0.005: 398, 0.01: 131, 0.02: 72},
    "noise first": {0.05: 52},
    "GroupNorm": {0.02: 103, 0.06: 85},
    "bf16": {0.003: 370, 0.01: 91},
    "cut": {0.02: 419, 0.03: 241},
    "accumulation": {0.1: 17},
    "residual": {0.005: 62, 0.01: 34},
    "auto-encoder": {0.001: 67, 0.006: 4},
    "fine-tuning": {0.05: 346, 0.1: 204},
}
# Learning rates of runs that learn unguarded.
HEALTHY = {
    "transformer": 0.003, "LSTM": 0.003, "graph": 0.01, "point cloud": 5e-4, "latent prior": 0.003,
    "cloning": 0.001, "Fourier": 0.0015, "clusters": 0.01, "Lion": 0.001, "noise first": 0.01,
    "GroupNorm": 0.01, "spectral": 0.01, "bf16": 0.001, "short run": 0.01, "accumulation": 0.03,
    "residual": 0.001, "auto-encoder": 0.003, "fine-tuning": 0.01,
}  # fmt: skip
SETTINGS: list[tuple[str, float, int | None]] = [
    *((kind, lr, death) for kind, own in DYING.items() for lr, death in own.items()),
    *((kind, lr, None) for kind, lr in HEALTHY.items()),
]
CELLS: dict[str, dict[str, Any]] = {
    f"{kind.replace(' ', '-')}_{lr:g}_{arm}": {"kind": kind, "lr": lr, "dies": dies, "arm": arm}
    for arm in ARMS
    for kind, lr, dies in SETTINGS
}


class Trainer:
    """A run of a kind.

    Args:
        kind: its name.
        lr: the learning rate.
        finer: steps for each one of the kind's chain, over the same path.
    """

    def __init__(self, kind: str, lr: float, finer: int = 1) -> None:
        self.kind = own = KINDS[kind]
        torch.manual_seed(0)
        data = own.data()
        self.held_out, self.data = [x[:HELD_OUT] for x in data], [x[HELD_OUT:] for x in data]
        self.f = own.network()
        self.optimizer = own.optimizer(self.f.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (own.warm_up or 1))
        )
        self.buffer = 2 * torch.rand(BUFFER, *data[0].shape[1:]) - 1
        self.told: dict[str, Any] = {"steps": own.steps, "size": own.size, "noise": own.noise}
        self.finer: dict[str, Any] = {
            "steps": finer * own.steps,
            "size": own.size / finer,
            "noise": own.noise / finer**0.5,
        }
        self.late: deque[Tensor] = deque(maxlen=LATE * own.micro_batches)
        generator = torch.Generator().manual_seed(1)
        self.probes = torch.empty_like(self.held_out[0]).uniform_(-2, 2, generator=generator)
        if kind != "Fourier":  # whose two margins say too much
            flat = self.held_out[0].flatten(1)
            orders = torch.rand(flat.shape, generator=generator).argsort(0)
            self.probes = flat.gather(0, orders).reshape(self.probes.shape)

    def draw(self, x: Tensor, *given: Tensor) -> Tensor:
        """The sampler."""
        start, rows = self.kind.start, None
        if start == "buffer":
            rows = torch.randint(BUFFER, (len(x),))
            is_new = torch.rand(len(x), *[1] * (x.dim() - 1)) < 0.05
            x = torch.where(is_new, 2 * torch.rand_like(x) - 1, self.buffer[rows])
        elif start == "noise":
            x = 2 * torch.rand_like(x) - 1
        elif start == "normal":
            x = torch.randn_like(x)
        x = self.kind.chain(self.f, x, *given, **self.finer)
        if rows is not None:
            self.buffer[rows] = x
        return x

    def difference(self, f_pos: Tensor, f_neg: Tensor) -> Tensor:
        """The loss without a guard."""
        if self.kind.is_energy:
            return f_pos.mean() - f_neg.mean()
        return -(f_pos.mean() - f_neg.mean())

    def update(self, loss_fn: Any, sample: Any) -> dict[str, float]:
        """One step of the optimizer; its numbers."""
        own, found = self.kind, []
        self.optimizer.zero_grad()
        for _ in range(own.micro_batches):
            i = torch.randint(len(self.data[0]), (own.batch // own.micro_batches,))
            x, *given = (each[i] for each in self.data)
            with torch.autocast("cpu", torch.bfloat16, enabled=own.casts):
                if own.chain is latent:  # of the data, by chains too
                    start = torch.randn_like(x)
                    x, given = latent(self.f, start, *given, **self.told), []
                x_neg = sample(x, *given)
                f_pos, f_neg = self.f(x, *given), self.f(x_neg, *given)
                loss = loss_fn(f_pos, f_neg) / own.micro_batches
                if isinstance(self.f, Classifier):
                    loss = loss + self.f.cross_entropy(x, *given)
            loss.backward()
            self.late.append(joined(x_neg, *given))
            found.append((f_pos.detach().float(), f_neg.detach().float()))
        self.optimizer.step()
        self.scheduler.step()
        sign = -1 if own.is_energy else 1
        f_pos, f_neg = (sign * torch.cat(each) for each in zip(*found, strict=True))
        return {
            "energy_gap": float(f_pos.mean() - f_neg.mean()),
            "f_pos/std": float(f_pos.std()),
            "energy_overlap": float((f_neg > f_pos[:, None]).float().mean()),
        }

    @torch.no_grad()
    def skill(self) -> float:
        """Area under the ROC curve of f between held-out data and data with permuted coordinates.

        In percent; NaN where f is not finite. In the plane the others are uniform points. Of a
        classifier it is the accuracy.
        """
        if isinstance(self.f, Classifier):
            logits, y = self.f.logits(self.held_out[0]), self.held_out[1]
            is_right = (logits.argmax(1) == y).double()
            return 100 * float(is_right.mean()) if logits.isfinite().all() else math.nan
        given = [] if self.kind.chain is latent else self.held_out[1:]
        self.f.eval()
        real, other = (self.f(x, *given) for x in (self.held_out[0], self.probes))
        self.f.train()
        if not bool(torch.isfinite(real).all() and torch.isfinite(other).all()):
            return math.nan
        if self.kind.is_energy:
            real, other = other, real
        higher = (real[:, None] > other).double() + 0.5 * (real[:, None] == other).double()
        return 100 * float(higher.mean())

    def distance(self) -> float:
        """From the last samples to held-out data; see :func:`frechet`."""
        data = self.held_out[:1] if self.kind.chain is latent else self.held_out
        return frechet(torch.cat([*self.late]), joined(*data))

    def digest(self) -> str:
        """Of parameters, samples and the random state."""
        state = [*self.f.parameters(), *self.late, self.buffer, torch.get_rng_state()]
        parts = b"".join(each.detach().numpy().tobytes() for each in state)
        return hashlib.sha256(parts).hexdigest()[:16]


def joined(x: Tensor, *given: Tensor) -> Tensor:
    """Samples as rows, with what they are conditioned on where these are rows: (B, d)."""
    return torch.cat([x.flatten(1), *(each for each in given if each.dim() == 2)], 1)


def frechet(one: Tensor, two: Tensor) -> float:
    """Of normal densities with the moments of samples (n, d) and (m, d), by the second's variance.

    On the first 20 axes of the second's principal components; NaN where a sample is not finite.
    """
    if not bool(torch.isfinite(one).all()):
        return math.nan
    one, two = one.double(), two.double()
    axes = torch.linalg.svd(two - two.mean(0), full_matrices=False).Vh[:20].mT
    one, two = one @ axes, two @ axes
    covs = [each.mT.cov().reshape(axes.shape[1], -1) for each in (one, two)]
    cross = torch.linalg.eigvals(covs[0] @ covs[1]).real.clamp(min=0).sqrt().sum()
    apart = (one.mean(0) - two.mean(0)).square().sum()
    return float((apart + covs[0].trace() + covs[1].trace() - 2 * cross) / covs[1].trace())


def rows_of(trainer: Trainer, arm: str, updates: int) -> Iterator[dict[str, float]]:
    """The rows of a run, until it has been broken for a while."""
    g, loss_fn, sample = None, trainer.difference, trainer.draw
    if (options := ARMS[arm]) is not None:
        if trainer.kind.is_energy:
            options = {"convention": "energy", **options}
        g = guard(None, trainer.draw, model=trainer.f, optimizer=trainer.optimizer, **options)
        if options.get("action") == "rollback":
            g.attach(buffer=trainer.buffer, scheduler=trainer.scheduler)
        loss_fn, sample = g
    watch, skill = Watch(), math.nan
    for update in range(updates):
        if update % SPARING == 0:
            skill = trainer.skill()
        row = trainer.update(loss_fn, sample) | {SKILL: skill}
        yield row | {tag: g.last.get(tag, math.nan) for tag in TAGS if g is not None}
        since = watch.take(row["energy_gap"], row["f_pos/std"])
        if since is not None and update - since >= AFTER:
            break
    if g is not None:
        g.close()


def measure(_: Path, kind: str, lr: float, arm: str, dies: int | None) -> dict[str, Any]:
    """Train a setting under an arm, and say what came of it."""
    trainer = Trainer(kind, lr, FINER if arm == "finer" else 1)
    rows: list[dict[str, float]] = []
    ended = None
    try:
        rows.extend(rows_of(trainer, arm, updates(dies)))
    except (BudgetSpentError, DivergenceError) as error:
        ended = type(error).__name__
    trace = {tag: np.array([row[tag] for row in rows]) for tag in rows[0]}
    least = TRAINED if isinstance(trainer.f, Classifier) else None
    fate = fate_of(trace, least)
    if ended is not None and fate.death is None:  # the guard gave the run up
        fate = dataclasses.replace(fate, name="dead", death=fate.steps)
    gradients = trainer.finer["steps"] * trainer.kind.micro_batches
    if ARMS[arm] is not None:
        finer = np.nan_to_num(trace["sampler/substeps"], nan=1)
        gradients = np.nanmean(trace["sampler/evaluations"] * finer) * trainer.kind.micro_batches
    return {
        **dataclasses.asdict(fate),
        "updates": updates(dies),
        "ended": ended,
        "distance": trainer.distance(),
        "sharp": first_over(trace, "sampler/sharpness"),
        "refined": first_over(trace, "sampler/substeps"),
        "gradients": float(gradients),
        "digest": trainer.digest(),
    }


def updates(dies: int | None) -> int:
    return UPDATES if dies is None else max(LEAST, LONGER * dies)


def first_over(trace: Mapping[str, Any], tag: str) -> int | None:
    """The first update in which a number is over 1."""
    over = np.flatnonzero(trace[tag] > 1) if tag in trace else np.array([])
    return int(over[0]) if over.size else None


def middle(own: Rows, name: str, form: str = ".3g") -> str:
    values = [x[name] for x in own if x[name] is not None and math.isfinite(x[name])]
    return number(median(values) if values else None, form)


def count(name: str) -> Callable[[Rows], str]:
    return lambda own: str(sum(x["name"] == name for x in own))


FATES: dict[str, Callable[[Rows], str]] = {
    "guard": lambda own: LABELS[own[0]["arm"]],
    "runs": lambda own: str(len(own)),
    **{name: count(name) for name in ("healthy", "limping", "collapsed", "dead")},
    "skill: best, last": lambda own: f"{middle(own, 'best')}, {middle(own, 'last')}",
    "distance": lambda own: middle(own, "distance", ".2g"),
    "gradients an update": lambda own: middle(own, "gradients"),
}


def shown(row: Mapping[str, Any]) -> str:
    """A run in a table of settings."""
    death = "" if row["death"] is None else f" {row['death']:,}"
    return f"{row['name']}{death}, {row['last']:.0f}, {number(row['distance'], '.2g')}"


def settings_of(rows: Rows) -> list[dict[str, str]]:
    """A line for each setting."""
    lines = []
    for kind, lr, dies in SETTINGS:
        own = {x["arm"]: x for x in rows if (x["kind"], x["lr"], x["dies"]) == (kind, lr, dies)}
        if not own:
            continue
        line = {"kind": kind, "rate": f"{lr:g}"}
        line |= {arm: shown(own[arm]) if arm in own else NONE for arm in ARMS}
        default = own.get("default", {})
        first = (default.get("sharp"), default.get("refined"))
        lines.append(line | {"S > 1, finer at": ", ".join(number(x, ",.0f") for x in first)})
    return lines


def slots(rows: Rows) -> dict[str, str]:
    plain = {(x["kind"], x["lr"]): x["digest"] for x in rows if x["arm"] == "unguarded"}
    equal = {
        "bits equal": lambda own: str(
            sum(x["digest"] == plain.get((x["kind"], x["lr"])) for x in own)
        )
    }
    dying, healthy = (
        [[x for x in rows if x["arm"] == arm and (x["dies"] is None) == lives] for arm in ARMS]
        for lives in (False, True)
    )
    return {
        "dying": table([own for own in dying if own], FATES),
        "healthy": table([own for own in healthy if own], FATES | equal),
        "settings-dying": table_of(settings_of([x for x in rows if x["dies"] is not None]), 2),
        "settings-healthy": table_of(settings_of([x for x in rows if x["dies"] is None]), 2),
    }


GRID = Grid("strangers", CELLS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
