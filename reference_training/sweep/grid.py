"""Settings of `ebmguard sweep`: which runs a grid has, for each trainer."""

from __future__ import annotations

import abc
import itertools
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from ebmguard.errors import ConfigError

from ..engine.run_config import RunConfig, below, command_words, refuse, short

if TYPE_CHECKING:  # the help needs no torch
    from .cell import Cell

COMMON = ("out", "resume", "no-resume")
PREFIXES = {"scenario": "s", "data": "", "method": "", "beta_star": "b", "seed": "seed"}
"""What stands before a value in the name of a run's folder."""


@dataclass(frozen=True, kw_only=True)
class Grid(abc.ABC):
    """Settings that all grids share; those of a trainer are a subclass, its command line."""

    out: Path
    """Folder of the grid, in which each run has a folder and a log beside it. Finished runs are
    kept, unfinished ones resumed. The machines of a cluster share it."""
    seeds: tuple[int, ...] = (0,)
    """Seeds, --seed of the runs."""
    address: str = "local"
    """Where Ray is: auto for the cluster that this machine belongs to, or HOST:PORT. With local
    nothing needs to be started, and nothing listens beyond the loopback address."""
    workers: int | None = None
    """Runs at a time at most; the default is as many as there are GPUs, else CPU cores."""
    print: bool = False
    """Train nothing; print the command of each run that is not finished, one a line."""
    training: tyro.conf.Positional[tuple[str, ...]] = ()
    """Options of every run, after "--"; see `ebmguard train` with --help."""

    trainer: ClassVar[type[RunConfig]]
    """Settings of a single run."""

    @property
    def axes(self) -> dict[str, str]:
        """Fields with the values of the grid, and the setting of a run that each is for."""
        common = {field.name for field in fields(Grid)}
        own = [field.name for field in fields(self) if field.name not in common]
        return {name: name.removesuffix("s") for name in (*own, "seeds")}

    def page(self) -> str | None:
        """Text for OUT/table.md, where the trainer has tables.

        Raises:
            ConfigError: there is no run yet.
        """
        return None

    def words(self, cell: Cell) -> list[str]:
        """What Python runs for a cell."""
        return ["-m", *self.trainer.words, *cell.words]

    def cells(self) -> list[Cell]:
        """Every run of the grid in the order of the work, their settings checked.

        Seeds are outermost, so that a grid which is half done compares all else.

        Raises:
            ConfigError: there is nothing to run, a value is there twice, or the settings do not
                make a run.
            SystemExit: `training` is no command line of the trainer; it says why.
        """
        problems = []
        for name in self.axes:
            values = getattr(self, name)
            if not values:
                problems.append(f"{name} is empty, expected at least one value")
            problems += [
                f"{name} has {v} twice" for v in sorted(set(values)) if values.count(v) > 1
            ]
        problems += below(self, workers=1)
        given = {word.partition("=")[0].replace("_", "-") for word in self.training}
        own = [f"--{name.replace('_', '-')}" for name in (*COMMON, *self.axes.values())]
        problems += [f"{name} after -- is the grid's own to give" for name in own if name in given]
        refuse(problems, "a grid")
        names = [name for name in self.axes if name != "seeds"]
        grid = itertools.product(self.seeds, *(getattr(self, name) for name in names))
        cells = [self._cell(dict(zip(("seeds", *names), values, strict=True))) for values in grid]
        for cell in cells:
            cell.config.check()
            if cell.config.device not in ("auto", "cuda", "cpu"):
                raise ConfigError(
                    f"device is {cell.config.device!r}, but each run of a grid sees its own GPUs "
                    "alone; expected auto, cuda or cpu, and choose the GPUs by CUDA_VISIBLE_DEVICES"
                )
        return cells

    def _cell(self, place: dict[str, Any]) -> Cell:
        from .cell import Cell

        values = {setting: short(place[name]) for name, setting in self.axes.items()}
        name = "_".join(
            value
            if setting == "scenario" and not value.isdecimal()
            else PREFIXES.get(setting, setting) + value
            for setting, value in values.items()
        )
        # One thread each: the runs have a core each. What is given after -- comes later and counts.
        words = ["--threads", "1", *self.training, "--out", str(self.out / name)]
        for setting, value in values.items():
            words += [f"--{setting.replace('_', '-')}", value]
        title = ", ".join(
            f"{setting.replace('beta_star', 'beta*')} {value}" for setting, value in values.items()
        )
        prog = " ".join(self.trainer.words)
        return Cell(title, tuple(words), tyro.cli(self.trainer, prog=prog, args=words))

    def command(self) -> str:
        """The command line of this grid, defaults left out."""
        words = command_words(
            self, "ebmguard", "sweep", self.trainer.words[-1], hidden=("training",)
        )
        return shlex.join([*words, *(("--", *self.training) if self.training else ())])
