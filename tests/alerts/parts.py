"""Rows for the alert tests, of real runs and synthetic ones; and a rule of one's own.

The excerpts (``data/*.json``) are consecutive steps of JEM runs on 8x8 digits (64 positives, 64
negatives, Adam 3e-3, 5 SGLD steps), but for ``short_run_start``, to three digits. ``accuracy`` is
the test accuracy after the update of the same step, so that what a row's alert could still save is
seen beside it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ebmguard.alerts import (
    DEFAULT_RULES,
    Alert,
    GrowthRule,
    Judge,
    Level,
    Limits,
    Reading,
    Rule,
)
from ebmguard.errors import DivergenceError

Row = dict[str, float]
DATA = Path(__file__).parent / "data"
GROWTH = next(rule for rule in DEFAULT_RULES if isinstance(rule, GrowthRule))


def grown(by: float, past: float = 0.0, spread: float = 1.0) -> float:
    """The gap that has grown by so much over its past, at a spread that stays."""
    other = spread + GROWTH.unit
    return (past + other) * math.exp(by) - other


ENERGIES = ("energy_gap", "f_pos/median", "f_pos/std", "f_neg/median", "f_neg/min", "f_neg/q95")
APART = {"energy_overlap": 0.0}
# Of a run whose past is as below: gaps that no other diagnostic supports.
WARNED, FAILED = grown(1.5 * GROWTH.growth, 0.2), grown(3 * GROWTH.growth)


@dataclass(frozen=True)
class Excerpt:
    """Consecutive rows of one run."""

    first_step: int
    rows: list[Row]
    accuracy: list[float]

    def accuracy_after(self, step: int) -> float:
        return self.accuracy[step - self.first_step]


@cache
def excerpt(name: str) -> Excerpt:
    """A recorded excerpt by name."""
    data = json.loads((DATA / f"{name}.json").read_text())
    columns = data["tags"].items()
    rows = [
        {"beta_star": float(data["beta_star"])} | {tag: float(v[i]) for tag, v in columns}
        for i in range(len(data["tags"]["energy_gap"]))
    ]
    return Excerpt(data["first_step"], rows, data["accuracy"])


def make_row(**changes: float) -> Row:
    """A healthy row; keywords change single diagnostics, with ``__`` for a slash."""
    row = {
        "beta_star": 0.0,
        "nonfinite/energies": 0.0,
        "energy_gap": 0.0,
        "energy_overlap": 0.5,
        "f_pos/median": 2.0,
        "f_pos/std": 1.0,
        "f_neg/median": 2.0,
        "f_neg/min": -1.0,
        "f_neg/q95": 3.5,
        "sampler/grad_norm": 0.2,
        "grad_scale": 0.98,
        "ess": 0.5,
        "pareto_k": 0.2,
        "ref/grad_scale": 0.98,
        "ref/ess": 0.5,
        "ref/pareto_k": 0.2,
    }
    return row | {name.replace("__", "/"): value for name, value in changes.items()}


def noise(count: int, seed: int = 0, gap: float = 0.0, **changes: Any) -> list[Row]:
    """Healthy rows with noise; the gap is added to it."""
    draw = random.Random(seed)
    lowest = changes.pop("f_neg__min", -1.0)
    return [
        make_row(
            energy_gap=gap + draw.gauss(0, 0.1),
            f_pos__median=2 + draw.gauss(0, 0.2),
            f_neg__min=lowest + draw.gauss(0, 0.3),
            sampler__grad_norm=0.2 * math.exp(draw.gauss(0, 0.15)),
            **changes,
        )
        for _ in range(count)
    ]


SETTLED = 3 * GROWTH.rows
STANDING = [make_row()] * SETTLED


def beginning(factor: float, final: float = 20.0) -> list[Row]:
    """All energies grow by a factor a step for 30 steps, and then stand."""
    draw = random.Random(0)
    sizes = [final * factor ** min(0, t - 30) for t in range(200)]
    gaps = [size * math.exp(draw.gauss(0, 0.05)) for size in sizes]
    return [
        make_row(energy_gap=gap, f_pos__std=size / 2, sampler__grad_norm=size, **APART)
        for gap, size in zip(gaps, sizes, strict=True)
    ]


def scaled(rows: Iterable[Row], unit: float) -> list[Row]:
    """The same run with energies in other units."""
    return [{tag: v * unit if tag in ENERGIES else v for tag, v in row.items()} for row in rows]


def found(rule: GrowthRule, rows: Iterable[Row]) -> list[Level | None]:
    """The level of each row, without the judge's memory."""
    watcher = rule.watcher()
    return [watcher.read(row).level for row in rows]


def feed(what: Judge | Rule, rows: Iterable[Mapping[str, float]], start: int = 0) -> list[Alert]:
    """The alerts of a judge, or of one rule alone, on rows of consecutive steps."""
    judge = what if isinstance(what, Judge) else Judge([what])
    return [alert for step, row in enumerate(rows, start) for alert in judge.observe(step, row)]


def levels(alerts: Iterable[Alert]) -> list[tuple[Level, int]]:
    return [(alert.level, alert.step) for alert in alerts]


class SlumpError(DivergenceError):
    """The accuracy is gone."""


@dataclass(frozen=True)
class Slump:
    """A user's rule: ERROR after some steps in which the accuracy is far below its best so far."""

    share: float = 0.5
    patience: int = 3
    name: str = "slump"
    error: type[DivergenceError] = SlumpError
    owed: tuple[str, ...] = ("accuracy",)

    def limits(self) -> dict[str, Limits]:
        return {"accuracy": Limits(low=0.1)}

    def watcher(self) -> SlumpWatcher:
        return SlumpWatcher(self)


class SlumpWatcher:
    def __init__(self, rule: Slump) -> None:
        self.rule = rule
        self.best = 0.0
        self.count = 0

    def read(self, row: Mapping[str, float]) -> Reading:
        value = row.get("accuracy")
        if value is None:
            return Reading(None, None)
        self.best = max(self.best, value)
        limit = self.rule.share * self.best
        self.count = self.count + 1 if value < limit else 0
        if self.count < self.rule.patience:
            return Reading(None, value >= limit)
        remedies = ("roll back", "a lower learning rate")
        return Reading(Level.ERROR, False, "accuracy", value, limit, self.count, remedies)

    def limits(self) -> dict[str, Limits]:
        return {"accuracy": Limits(low=self.rule.share * self.best)}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.count = float(state["best"]), int(state["count"])
