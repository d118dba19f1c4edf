"""`ebmguard sweep`: from settings to a grid of runs, or to their commands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from ebmguard.errors import ConfigError

from ..engine.interrupt import INTERRUPTED
from .cell import Cell
from .grid import Grid
from .sweep import Stop, Sweep
from .view import View

FAILED = 1


def run(grid: Grid) -> int:
    """`ebmguard sweep`: train what the grid lacks, or print the commands that do.

    Returns:
        Exit status: 0, 1 where a run failed, or 130 where Ctrl-C stopped the grid.

    Raises:
        ConfigError: the settings do not make a grid, its folder cannot be written, there is no such
            cluster, or it has no GPU.
        ImportError: Ray is not installed.
    """
    cells = grid.cells()
    if grid.print:
        for cell in cells:
            if cell.results() is None:
                _, *words = grid.words(cell)
                print(shlex.join([*words, *(["--resume"] if cell.begun_by.is_file() else [])]))
        return 0
    if "WORLD_SIZE" in os.environ or "RANK" in os.environ:
        raise ConfigError(
            "RANK or WORLD_SIZE is set, as torchrun does; start a sweep once, without torchrun, "
            "and give --address for a Ray cluster of several machines"
        )
    return work_on(grid, cells, grid.command())


def work_on(plan: Grid, cells: Sequence[Cell], command: str) -> int:
    """Do what is not done of a plan's cells.

    Args:
        plan: how they are run: a grid, or what :class:`~.sweep.Sweep` takes for one.
        cells: in the order of the work.
        command: that goes on with them.

    Returns:
        Exit status: 0, 1 where a run failed, or 130 where Ctrl-C stopped the work.

    Raises:
        ConfigError: its folder cannot be written, there is no such cluster, or it has no GPU.
        ImportError: Ray is not installed.
    """
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{plan.out} cannot be the folder of a grid: {error}") from error
    with View(cells) as view:
        sweep = Sweep(plan, cells, view)
        with sweep.connected(), Stop() as stop:
            sweep.run(stop)
    for number, why in sorted(sweep.failures.items()):
        print(f"FAILED {cells[number].title}: {why}")
    if sweep.unfinished:
        print(f"stopped; go on with: {command}")
        return INTERRUPTED
    return FAILED if sweep.failures else 0
