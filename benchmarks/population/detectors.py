"""Detectors: the shipped rules, and one line each to compare them with.

A detector takes the rows of one run, a pandas frame with a column for each tag and a row for each
step, and returns the steps of its ERRORs. A row may tell of later ones only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

import numpy as np
import pandas as pd

from ebmguard.alerts import DEFAULT_RULES, Judge, Level, Rule

from .record import rows_of

Detect = Callable[[pd.DataFrame], Iterable[int]]
GAP, SPREAD = "energy_gap", "f_pos/std"
WINDOW, LEAST, QUIET = 64, 8, 10


def shipped(rows: pd.DataFrame) -> list[int]:
    """The ERRORs of the rules that are shipped, on a run that is only watched."""
    return errors_of(rows_of({tag: rows[tag].to_numpy() for tag in rows}))


def errors_of(
    rows: Iterable[Mapping[str, float]], rules: Sequence[Rule] = DEFAULT_RULES
) -> list[int]:
    """The steps of the ERRORs that rules raise."""
    judge = Judge(rules)
    return [
        step
        for step, row in enumerate(rows)
        for alert in judge.observe(step, row)
        if alert.level is Level.ERROR
    ]


def onsets(fires: pd.Series[bool]) -> list[int]:
    """Where it fires after ten rows on which it did not."""
    steps = np.flatnonzero(fires)
    return [int(s) for i, s in enumerate(steps) if not i or s - steps[i - 1] > QUIET]


def in_spreads(rows: pd.DataFrame, floor: float = 1.0) -> pd.Series[float]:
    """|gap| in medians of the spread of f on data over the 8 to 64 rows before."""
    spread = rows[SPREAD].rolling(WINDOW, min_periods=LEAST).median().shift()
    return rows[GAP].abs() / spread.clip(lower=floor).fillna(math.inf)


def spreads_in_episodes(rows: pd.DataFrame) -> list[int]:
    """The first of an episode, and what is e^0.9 as large; 20 quiet rows on which energies touch
    end it."""
    steps, last, calm = [], math.nan, 0
    touches = rows["energy_overlap"].between(0.25, 0.75)
    for step, (size, touch) in enumerate(zip(in_spreads(rows), touches, strict=True)):
        if size <= 30:
            calm += touch
            last = math.nan if calm >= 20 else last
        else:
            calm = 0
            if not size <= math.exp(0.9) * last:
                steps.append(step)
                last = size
    return steps


def z_score(values: pd.Series[float]) -> list[int]:
    past = values.rolling(WINDOW, min_periods=LEAST)
    return onsets((values - past.mean().shift()).abs() / past.std().shift() > 5)


BASELINES: dict[str, Detect] = {
    "gap over 30 spreads": lambda rows: onsets(~(in_spreads(rows) <= 30)),
    "the same, no floor": lambda rows: onsets(~(in_spreads(rows, 1e-12) <= 30)),
    "the same, in episodes": spreads_in_episodes,
    # Of a run without a second loss it is the gap, where the loss is not there.
    "loss, z over 5": lambda rows: z_score(rows["loss" if "loss" in rows else GAP]),
    "gap, z over 5": lambda rows: z_score(rows[GAP]),
    "gap over 1,000": lambda rows: onsets(~(rows[GAP].abs() <= 1e3)),
}


def named(path: str) -> Detect:
    """The detector of ``module:function``."""
    module, _, name = path.partition(":")
    found: Detect = getattr(import_module(module), name)
    return found
