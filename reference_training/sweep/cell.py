"""One cell of a grid: the command that does it, and whether it is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engine.run_config import RunConfig
from ..engine.run_folder import CONFIG, RESULTS, read_config, read_json


@dataclass(frozen=True)
class Cell:
    """Work that a process of its own does from its start to its end.

    Attributes:
        out: its folder; a file beside it, `row`, is written at its end.
        command: the module that Python runs, and its arguments.
    """

    out: Path
    command: tuple[str, ...]

    @property
    def log(self) -> Path:
        """What the process prints: a file beside the folder, which is also the cell's lock."""
        return self.out.with_name(f"{self.out.name}.log")

    @property
    def row(self) -> Path:
        """What came of it."""
        return self.out.with_name(f"{self.out.name}.json")

    def words(self) -> list[str]:
        """The command that does what is not done."""
        return list(self.command)

    def over(self) -> str | None:
        """How it went, once it has come to its end."""
        return "done" if self.row.is_file() else None


@dataclass(frozen=True)
class Run(Cell):
    """A run of a reference trainer with its settings, whose results are in its folder."""

    config: RunConfig

    def words(self) -> list[str]:
        """The command that begins the run, or goes on with it."""
        return [*self.command, *(["--resume"] if (self.out / CONFIG).is_file() else [])]

    def over(self) -> str | None:
        """How the run went, once it has come to the end of these settings.

        A run with fewer steps than are asked for now has not, unless it has diverged as a whole or
        its guard has ended it.

        Raises:
            ConfigError: the finished run has other settings, or a file of it is damaged.
        """
        if not ((self.out / CONFIG).is_file() and (self.out / RESULTS).is_file()):
            return None
        wanted = self.config.resumed(read_config(self.out)).total_steps
        results = read_json(self.out / RESULTS)
        members, diverged_at = results.get("members"), results["diverged_at"]
        if results.get("ended") is not None:
            how = f"ended by its guard after {results['steps']}"
        elif diverged_at is not None and members is None:
            how = f"diverged at {diverged_at}"
        elif results["iterations"] < wanted:
            return None
        else:
            how = "finished"
        if members is not None:  # they diverge one by one, and the others go on
            lost = sum(member["diverged_at"] is not None for member in members)
            how += f", {lost} of {len(members)} members diverged"
        accuracy = results.get("accuracy")
        return how if accuracy is None else f"{how}, accuracy {accuracy:.1%}"
