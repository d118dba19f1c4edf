"""One run of a grid: its settings, and what its folder says about it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebmguard.sinks.opened import opened

from ..engine.run_config import RunConfig
from ..engine.run_folder import CONFIG, METRICS, RESULTS, read_config, read_json

TAIL = 1 << 16
"""Bytes from the end of a row file that hold a whole row."""


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        title: the cell in words.
        words: the options of its trainer's command.
        config: the same, parsed.
    """

    title: str
    words: tuple[str, ...]
    config: RunConfig

    @property
    def log(self) -> Path:
        """What the run prints: a file beside its folder, which is also the run's lock."""
        return self.config.out.with_name(f"{self.config.out.name}.log")

    @property
    def device(self) -> str:
        """Where it is to train."""
        return str(self.config.device)

    @property
    def begun_by(self) -> Path:
        """A file that is there when there is a run to go on with."""
        return self.config.out / CONFIG

    def over(self) -> str | None:
        """How the run went, once it has come to its end.

        Raises:
            ConfigError: as :meth:`results`.
        """
        results = self.results()
        return None if results is None else outcome(results)

    def progress(self) -> str:
        """How far the run has come."""
        return f"{self.steps()} of {self.config.total_steps}"

    def results(self) -> dict[str, Any] | None:
        """The results of a run that has come to the end of these settings; None otherwise.

        A run with fewer steps than are asked for now has not, unless it has diverged as a whole or
        its guard has ended it.

        Raises:
            ConfigError: the finished run has other settings, or a file of it is damaged.
        """
        file = self.config.out / RESULTS
        if not (self.begun_by.is_file() and file.is_file()):
            return None
        wanted = self.config.resumed(read_config(self.config.out)).total_steps
        results = read_json(file)
        # The members of an ensemble diverge one by one; the others go on.
        lost = results["diverged_at"] is not None and "members" not in results
        over = lost or results.get("ended") is not None
        return results if over or results["iterations"] >= wanted else None

    def steps(self) -> int:
        """Training steps done, as far as the guard's rows on the disk say."""
        rows = opened(self.config.out / METRICS)
        if rows is None:
            return 0
        with rows:
            rows.seek(max(0, rows.seek(0, os.SEEK_END) - TAIL))
            found = re.findall(rb'"step": (\d+)[,}]', rows.read())
        return int(found[-1]) + 1 if found else 0


def outcome(results: dict[str, Any]) -> str:
    """How a run went, in a few words."""
    diverged_at, accuracy = results["diverged_at"], results.get("accuracy")
    if results.get("ended") is not None:
        words = f"ended by its guard after {results['steps']}"
    elif "members" in results:
        lost = sum(member["diverged_at"] is not None for member in results["members"])
        words = f"finished, {lost} of {len(results['members'])} members diverged"
    else:
        words = "finished" if diverged_at is None else f"diverged at {diverged_at}"
    return words if accuracy is None else f"{words}, accuracy {accuracy:.1%}"
