"""One run of a grid: its settings, and what its folder says about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...run_folder import CONFIG, RESULTS
from ..config import JemConfig


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        words: its options of `ebmguard train jem`.
        config: the same, parsed.
    """

    words: tuple[str, ...]
    config: JemConfig

    @property
    def title(self) -> str:
        """The cell in words."""
        config = self.config
        return f"scenario {config.scenario_name}, beta* {config.beta_star:g}, seed {config.seed}"

    @property
    def log(self) -> Path:
        """What the run prints: a file beside its folder, which is also the run's lock."""
        return self.config.out.with_name(f"{self.config.out.name}.log")

    @property
    def begun(self) -> bool:
        """Whether there is a run to go on with."""
        return (self.config.out / CONFIG).is_file()

    def results(self) -> dict[str, Any] | None:
        """The results of a run that has come to the end of these settings; None otherwise.

        A run with fewer steps than are asked for now has not, unless it has diverged or its guard
        has ended it.

        Raises:
            ConfigError: the finished run has other settings.
        """
        file = self.config.out / RESULTS
        if not (self.begun and file.is_file()):
            return None
        stored = json.loads((self.config.out / CONFIG).read_text(encoding="utf-8"))
        wanted = self.config.resumed(stored).settings.iterations
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        over = results["diverged_at"] is not None or results.get("ended") is not None
        if not over and results["iterations"] < wanted:
            return None
        return results


def outcome(results: dict[str, Any]) -> str:
    """How a run went, in a few words."""
    diverged_at, accuracy = results["diverged_at"], results.get("accuracy")
    words = f"diverged at {diverged_at}" if diverged_at is not None else "finished"
    if results.get("ended") is not None:
        words = f"ended by its guard after {results['steps']}"
    return words if accuracy is None else f"{words}, accuracy {accuracy:.1%}"
