"""`ebmguard sweep jem`: from settings to a grid of runs."""

from __future__ import annotations

import os

import torch

from ebmguard.errors import ConfigError

from ...interrupt import INTERRUPTED
from .config import SweepConfig
from .others import Others
from .place import find_place
from .stop import Stop
from .sweep import Sweep

FAILED = 1


def run(config: SweepConfig) -> int:
    """`ebmguard sweep jem`: train what the grid lacks.

    Returns:
        Exit status: 0, 1 where a run failed, or 130 where Ctrl-C stopped the grid.

    Raises:
        ConfigError: the settings do not make a grid, or its folder cannot be written.
    """
    cells = config.cells()
    place = find_place(
        os.environ,
        device=cells[0].config.device,
        gpu_count=torch.cuda.device_count(),
        workers=config.workers,
    )
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{config.out} cannot be the folder of a grid: {error}") from error
    others = Others(place)
    sweep = Sweep(config.out, cells, place)
    with Stop() as stop:
        sweep.run(stop)
        others.wait(stop)
    if sweep.unfinished:
        again = config.command() if place.world == 1 else "the same torchrun command"
        sweep.say(f"stopped; go on with: {again}")
        return INTERRUPTED
    return FAILED if sweep.failures else 0
