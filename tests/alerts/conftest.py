"""Rows for the alert tests: recorded excerpts of real runs, and synthetic ones.

The excerpts (``data/*.json``) are consecutive steps of JEM runs on 8x8 digits (64 positives, 64
negatives, Adam 3e-3, 5 SGLD steps), but for ``short_run_start``, to three digits. ``accuracy`` is
the test accuracy after the update of the same step, so that what a row's alert could still save is
seen beside it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

Row = dict[str, float]
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Excerpt:
    """Consecutive rows of one run."""

    first_step: int
    rows: list[Row]
    accuracy: list[float]

    def accuracy_after(self, step: int) -> float:
        return self.accuracy[step - self.first_step]


@pytest.fixture(scope="session")
def excerpt() -> Callable[[str], Excerpt]:
    """Load a recorded excerpt by name."""

    def load(name: str) -> Excerpt:
        data = json.loads((DATA / f"{name}.json").read_text())
        columns = data["tags"].items()
        rows = [
            {"beta_star": float(data["beta_star"])} | {tag: float(v[i]) for tag, v in columns}
            for i in range(len(data["tags"]["energy_gap"]))
        ]
        return Excerpt(data["first_step"], rows, data["accuracy"])

    return load


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Row]:
    """A healthy row; keywords change single diagnostics."""

    def make(**changes: float) -> Row:
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

    return make


@pytest.fixture
def noise(make_row):
    """`count` healthy rows; a gap keyword is added to the noise."""

    def rows(count, seed=0, gap=0.0, **changes):
        draw = random.Random(seed)
        return [
            make_row(
                energy_gap=gap + draw.gauss(0, 0.1),
                f_pos__median=2 + draw.gauss(0, 0.2),
                f_neg__min=changes.get("f_neg__min", -1.0) + draw.gauss(0, 0.3),
                sampler__grad_norm=0.2 * math.exp(draw.gauss(0, 0.15)),
                **{k: v for k, v in changes.items() if k != "f_neg__min"},
            )
            for _ in range(count)
        ]

    return rows
