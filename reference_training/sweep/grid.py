"""Settings of `ebmguard sweep`: which runs a grid has, for each trainer."""

from __future__ import annotations

import abc
import itertools
import os
import shlex
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from ebmguard.errors import ConfigError

from ..engine.run_config import RunConfig, below, refuse, short

if TYPE_CHECKING:  # the help needs no torch
    from .cell import Run

COMMON = ("out", "resume", "no-resume")
PREFIXES = {"scenario": "s", "data": "", "method": "", "beta_star": "b", "seed": "seed"}
"""What stands before a value in the name of a run's folder."""


@dataclass(frozen=True, kw_only=True)
class Grid(abc.ABC):
    """Settings that all grids share; those of a trainer are a subclass, its command line."""

    out: Path
    """Folder of the grid, in which each run has a folder and a log beside it. Finished runs are
    kept, unfinished ones resumed. Machines that share it may work on it together."""
    seeds: tuple[int, ...] = (0,)
    """Seeds, --seed of the runs."""
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

    def write_page(self) -> None:
        """Write OUT/table.md, whole at every moment, whoever else writes it; raises as `page`."""
        if (text := self.page()) is not None:
            partial = self.out / f".table.md.{socket.gethostname()}.{os.getpid()}"
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self.out / "table.md")

    def cells(self) -> list[Run]:
        """Every run of the grid in the order of the work, their settings checked.

        Seeds are outermost, so that a grid which is half done compares all else.

        Raises:
            ConfigError: there is nothing to run, or the settings do not make a run.
            SystemExit: `training` is no command line of the trainer; it says why.
        """
        values = {name: dict.fromkeys(getattr(self, name)) for name in ("seeds", *self.axes)}
        problems = [f"{x} is empty, expected at least one value" for x in values if not values[x]]
        problems += below(self, workers=1)
        given = {word.partition("=")[0].replace("_", "-") for word in self.training}
        own = [f"--{name.replace('_', '-')}" for name in (*COMMON, *self.axes.values())]
        problems += [f"{name} after -- is the grid's own to give" for name in own if name in given]
        refuse(problems, "a grid")
        places = itertools.product(*values.values())
        cells = [self._cell(dict(zip(values, place, strict=True))) for place in places]
        for cell in cells:
            cell.config.check()
        if (device := cells[0].config.device) not in ("auto", "cuda", "cpu"):
            why = (
                "each run of a grid sees its own GPU alone; choose the GPUs by CUDA_VISIBLE_DEVICES"
            )
            refuse([f"device is {device}, expected auto, cuda or cpu: {why}"], "a grid")
        return cells

    def _cell(self, place: dict[str, Any]) -> Run:
        from .cell import Run

        values = {setting: short(place[name]) for name, setting in self.axes.items()}
        name = "_".join(
            value
            if setting == "scenario" and not value.isdecimal()
            else PREFIXES.get(setting, setting) + value
            for setting, value in values.items()
        )
        out = self.out / name
        # One thread each: the runs have a core each. What is given after -- comes later and counts.
        words = ["--threads", "1", *self.training, "--out", str(out)]
        for setting, value in values.items():
            words += [f"--{setting.replace('_', '-')}", value]
        config = tyro.cli(self.trainer, prog=" ".join(self.trainer.words), args=words)
        return Run(out, (*self.trainer.words, *words), config)


def run(grid: Grid) -> int:
    """`ebmguard sweep`: train what the grid lacks, or print the commands that do.

    Returns:
        Exit status: 0, 1 where a run failed, or 130 where a signal stopped the grid.

    Raises:
        ConfigError: the settings do not make a grid, its folder cannot be written, or there is no
            GPU for it.
    """
    from .sweep import Sweep, places

    cells = grid.cells()
    if grid.print:
        for cell in cells:
            if cell.over() is None:
                print(shlex.join(cell.words()))
        return 0
    if "WORLD_SIZE" in os.environ or "RANK" in os.environ:
        raise ConfigError(
            "RANK or WORLD_SIZE is set, as torchrun does; start a sweep once on each machine, "
            "without torchrun"
        )
    gpus = places(cells[0].config.device, grid.workers)
    return Sweep(cells, gpus, grid.write_page).run()
