"""`ebmguard sweep`: from settings to a grid of runs, or to their commands."""

from __future__ import annotations

import os
import shlex

import torch

from ebmguard.errors import ConfigError

from .grid import Grid
from .sweep import Sweep


def run(grid: Grid) -> int:
    """`ebmguard sweep`: train what the grid lacks, or print the commands that do.

    Returns:
        Exit status: 0, 1 where a run failed, or 130 where Ctrl-C stopped the grid.

    Raises:
        ConfigError: the settings do not make a grid, its folder cannot be written, or there is no
            GPU for it.
    """
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
    return Sweep(cells, gpus, grid.write_page, grid.command()).run()


def places(device: str, workers: int | None) -> list[str]:
    """Where runs are trained at the same time: the GPU of each, or "" for one of a core.

    Raises:
        ConfigError: there is no GPU, and the device is one.
    """
    count = 0 if device == "cpu" else torch.cuda.device_count()
    if count:
        own = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
        return own.split(",")[:count][:workers]
    if device == "cuda":
        raise ConfigError("each run is to have a GPU, and there is none; give `-- --device cpu`")
    has_affinity = hasattr(os, "sched_getaffinity")
    return [""] * (workers or len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
