"""A run folder as the doctor reads it: the rows that count, alerts, rollbacks, settings."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..sinks import read_jsonl

__all__ = ["LATE", "FinishedRun", "read_run"]

# Rows at the end that stand for how the run is now.
LATE = 100


@dataclass(frozen=True)
class FinishedRun:
    """A folder.

    Attributes:
        path: the folder.
        rows: one for each step, oldest first; of steps that came again after a rollback, the last.
        alerts, rollbacks: records, oldest first.
        config, results: what the trainer wrote, empty where it wrote none.
        accuracy: test accuracy by step.
    """

    path: Path
    rows: list[dict[str, Any]]
    alerts: list[dict[str, Any]]
    rollbacks: list[dict[str, Any]]
    config: dict[str, Any]
    results: dict[str, Any]
    accuracy: list[tuple[int, float]]

    def series(self, tag: str) -> list[tuple[int, float]]:
        """Steps and values of a tag where it is a number."""
        return [
            (row["step"], float(row[tag]))
            for row in self.rows
            if isinstance(row.get(tag), int | float) and not math.isnan(row[tag])
        ]

    def late(self, tag: str) -> float | None:
        """The median over the last rows; None where nothing is known there."""
        if not self.rows:
            return None
        first = self.rows[-1]["step"] - LATE
        values = [value for step, value in self.series(tag) if step > first]
        return statistics.median(values) if values else None

    def weight(self, tag: str) -> str:
        """The tag of a weight diagnostic: at β* = 0 the one at the reference exponent."""
        return f"ref/{tag}" if self.late("beta_star") == 0 else tag

    def setting(self, name: str) -> float | None:
        """A number from the trainer's settings."""
        nested = self.config.get("settings")
        for each in (nested if isinstance(nested, dict) else {}, self.config):
            value = each.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None


def read_run(path: Path) -> FinishedRun:
    """Read a folder that the guard has written to.

    Raises:
        ConfigError: it holds no rows, or a file in it is damaged.
    """
    if not (path / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{path} holds no metrics.jsonl. Expected the folder of a run (log_dir= of the guard), "
            "or the Python file of a trainer."
        )
    rows: list[dict[str, Any]] = []
    for row in read_jsonl(path / "metrics.jsonl"):
        while rows and rows[-1]["step"] >= row["step"]:  # taken back by a rollback
            rows.pop()
        rows.append(row)
    accuracy = [
        (row["step"], float(row["test_accuracy"]))
        for row in _lines(path / "accuracy.jsonl")
        if "test_accuracy" in row
    ]
    return FinishedRun(
        path=path,
        rows=rows,
        alerts=_lines(path / "alerts.jsonl"),
        rollbacks=_lines(path / "recovery.jsonl"),
        config=_object(path / "config.json"),
        results=_object(path / "results.json"),
        accuracy=sorted(accuracy),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.is_file() else []


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Restore the file.") from error
    return found if isinstance(found, dict) else {}
