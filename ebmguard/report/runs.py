"""A finished run, read from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..sinks import read_jsonl

__all__ = ["Run"]


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Attributes:
        path: the folder.
        config: the resolved settings.
        results: how the run went.
        rows: the guard's diagnostics, a dict of tag to value for each step.
        accuracy: test accuracy by step.
        alerts: the guard's alerts as records, oldest first.
    """

    path: Path
    config: dict[str, Any]
    results: dict[str, Any]
    rows: list[dict[str, Any]]
    accuracy: list[tuple[int, float]]
    alerts: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a folder that a reference trainer has written.

        Raises:
            ConfigError: a file is missing, so that this is no run or one that has not ended; or
                the run is of another kind.
        """
        missing = [
            name
            for name in ("config.json", "results.json", "metrics.jsonl")
            if not (path / name).is_file()
        ]
        if missing:
            raise ConfigError(
                f"{path} is not the folder of a finished run: {', '.join(missing)} missing. Finish "
                "it with `ebmguard train ... --resume`, or name another folder."
            )
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if "beta_star" not in config:
            raise ConfigError(
                f"{path} holds a run without one beta_star, such as a toy ensemble, whose members "
                "`ebmguard figure` compares. Expected runs of `ebmguard train jem`."
            )
        evaluations = path / "accuracy.jsonl"
        accuracy = read_jsonl(evaluations) if evaluations.is_file() else []
        return cls(
            path=path,
            config=config,
            results=json.loads((path / "results.json").read_text(encoding="utf-8")),
            rows=read_jsonl(path / "metrics.jsonl"),
            # Steps before an alert are evaluated late, out of order.
            accuracy=sorted((row["step"], row["test_accuracy"]) for row in accuracy),
            alerts=read_jsonl(path / "alerts.jsonl") if (path / "alerts.jsonl").is_file() else [],
        )

    @property
    def name(self) -> str:
        """The run by the setting that matters."""
        return f"β* = {self.config['beta_star']:g}"

    def series(self, tag: str) -> tuple[list[int], list[float]]:
        """Steps and values of a tag, where it was recorded."""
        pairs = [(row["step"], float(row[tag])) for row in self.rows if tag in row]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def first_alert(self, level: str) -> dict[str, Any] | None:
        """The first alert of a level, "WARN" or "ERROR"."""
        return next((alert for alert in self.alerts if alert["level"] == level), None)

    def accuracy_at(self, step: int) -> float | None:
        """Test accuracy of the latest evaluation up to a step."""
        before = [value for at, value in self.accuracy if at <= step]
        return before[-1] if before else None
