"""`ebmguard figure`, of short-run models: open the runs, draw the figure, print its numbers."""

from __future__ import annotations

import importlib
import json

import torch

from ebmguard.errors import ConfigError
from ebmguard.sinks import to_json

from ...device import find_device
from ...plots.canvas import check_picture, save_picture
from ..trained import load_run
from .config import FigureConfig
from .made import Made

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
            the figure shows, or a file cannot be written.
        ImportError: matplotlib is not installed.
    """
    config.check()
    # What draws is tried before chains are run for minutes, not after them.
    check_picture(config.file)
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    # A figure's module brings what it alone needs, and other figures should not wait for it.
    module = importlib.import_module(f".{MODULES[config.name]}", __package__)
    made: Made = module.make(
        [load_run(path, device, config.data_root) for path in config.runs], config
    )
    save_picture(made.figure, config.file)
    text = json.dumps(to_json(made.numbers), indent=2, allow_nan=False) + "\n"
    try:
        config.numbers_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{config.numbers_file} cannot be written: {error}") from error
    print(f"{made.text}\n\npicture: {config.file}\nnumbers: {config.numbers_file}")
    return 0
