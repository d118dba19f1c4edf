"""Rows of a run as a file has them, and those of its last course."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

METRICS = "metrics.jsonl"


def last_course(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows in the order of a file, without those of steps that a rollback gave up.

    A step that comes again replaces what there was from it on.
    """
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def series(
    path: Path, tags: Sequence[str]
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Some of the guard's diagnostics at every step that was recorded (metrics.jsonl).

    The file of a published JEM run has 140,600 lines with some fifty numbers each, so that only
    what is asked for is kept.

    Args:
        path: the run folder. Where it is in progress, a last line that is not complete is left out.
        tags: names of diagnostics, such as "energy_gap".

    Returns:
        (T,) steps, ascending, and for each tag (T,) values, NaN where it was not recorded. Of a run
        that was rolled back, those of its last course.
    """
    kept: list[Mapping[str, Any]] = []
    if (path / METRICS).is_file():
        with (path / METRICS).open(encoding="utf-8") as lines:
            rows = (json.loads(line) for line in lines if line.endswith("\n"))
            kept = last_course(
                {"step": row["step"]} | {tag: float(row.get(tag, math.nan)) for tag in tags}
                for row in rows
            )
    values = {tag: np.array([row[tag] for row in kept], dtype=np.float64) for tag in tags}
    return np.array([row["step"] for row in kept], dtype=np.int64), values
