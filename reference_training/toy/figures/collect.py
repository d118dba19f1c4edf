"""The runs that a figure needs: those that are there, and those that are still to be trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ebmguard.errors import ConfigError

from ...engine.run_folder import CONFIG, RESULTS, read_json
from ..config import ToyConfig
from .config import FigureConfig
from .runs import ToyRun, load_run

Trainer = Callable[[ToyConfig], dict[str, Any] | None]
"""Trains a run to its end; None where Ctrl-C stopped it."""


def collect(config: FigureConfig, train: Trainer) -> dict[str, ToyRun] | None:
    """The finished runs of a figure by scenario, trained where they are not there yet.

    All folders are looked at before anything is trained.

    Args:
        config: the figure.
        train: trains one run.

    Returns:
        None where Ctrl-C stopped a training.

    Raises:
        ConfigError: a folder holds a run with other settings, or one cannot be trained.
    """
    wanted = {scenario: config.training(scenario) for scenario in config.spec.scenarios}
    for training in wanted.values():
        training.check()
        _refuse_other_run(training)
    for number, (scenario, training) in enumerate(wanted.items(), start=1):
        if _is_finished(training):
            continue
        begun = (training.out / CONFIG).is_file()
        doing = "resuming" if begun else "training"
        print(f"{doing} {scenario} in {training.out} ({number} of {len(wanted)})", flush=True)
        if train(dataclasses.replace(training, resume=begun)) is None:
            return None
    return {scenario: load_run(training.out) for scenario, training in wanted.items()}


def _is_finished(training: ToyConfig) -> bool:
    # A run that is being made longer has the results of the shorter one.
    file = training.out / RESULTS
    if not file.is_file():
        return False
    return bool(read_json(file)["iterations"] == training.settings.iterations)


def _refuse_other_run(training: ToyConfig) -> None:
    file = training.out / CONFIG
    if not file.is_file():
        return
    stored = read_json(file)
    asked = training.to_json()
    names = ("scenario", "betas", "variants", "seed", "seeds")
    clashes = [
        f"{name}: {stored.get(name)} there, {asked[name]} here"
        for name in names
        if stored.get(name) != asked[name]
    ]
    settings = stored.get("settings", {})
    clashes += [
        f"{name}: {settings.get(name)} there, {value} here"
        for name, value in asked["settings"].items()
        if settings.get(name) != value
    ]
    if clashes:
        raise ConfigError(
            f"{training.out} holds a run with other settings than this figure's; give the options "
            "that it was made with, or choose another --out:\n  " + "\n  ".join(clashes)
        )
