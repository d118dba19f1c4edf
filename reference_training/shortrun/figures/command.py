"""`ebmguard figure`, of short-run models: open the runs, draw the figure, print its numbers."""

from __future__ import annotations

import importlib

import torch

from ...device import find_device
from ...plots.figure import Made, draw
from ..trained import load_run
from .config import FigureConfig

MODULES = {
    "12": "energies",
    "13": "histograms",
    "14": "histograms",
    "15": "grids",
    "steps": "sampling_steps",
    "interpolation": "interpolation",
    "reconstruction": "reconstruction",
    "likelihood": "likelihood",
    "long-run": "long_run",
}
"""Of each figure, the module beside this one whose `make(runs, config)` draws it."""


def run(config: FigureConfig) -> int:
    """`ebmguard figure`, of short-run models.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: the settings cannot be meant, a folder holds no such run, the runs lack what
            the figure shows, or the picture cannot be written.
        DiskError: its numbers cannot be written.
        ImportError: matplotlib is not installed.
    """
    config.check()
    return draw(config, lambda: make(config))


def make(config: FigureConfig) -> Made:
    """The figure that its module draws.

    Raises:
        ConfigError: a folder holds no such run, or the runs lack what the figure shows.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    # A figure's module brings what it alone needs, and other figures should not wait for it.
    module = importlib.import_module(f".{MODULES[config.name]}", __package__)
    runs = [load_run(path, device, config.data_root) for path in config.runs]
    made: Made = module.make(runs, config)
    return made
