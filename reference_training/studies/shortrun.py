"""Runs of `ebmguard train shortrun` in a study: how they are opened, told apart and refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from ..device import find_device
from ..shortrun.trained import TrainedRun, load_run
from .config import ShortRunFigure
from .study import ABOUT

REFERENCES = 500
"""Images of a data set, at most, that samples are held against."""
TOGETHER = 200
"""Chains that are run together: the noise of many steps is drawn at once."""


def opened(config: ShortRunFigure) -> list[TrainedRun]:
    """The runs that the command names."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    return [load_run(path, device, config.data_root) for path in dict.fromkeys(config.runs)]


def some_of(
    run: TrainedRun, images: Tensor, generator: torch.Generator, count: int = REFERENCES
) -> Tensor:
    """Random images of a run's data set in [-1, 1], at most `count`."""
    order = torch.randperm(len(images), generator=generator, device=run.device)
    return run.data.scale(images[order[:count]])


def noisy(run: TrainedRun, images: Tensor, generator: torch.Generator) -> Tensor:
    """Images with the noise of a run's training."""
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    return images + run.settings.data_noise * noise


def followed(
    run: TrainedRun,
    x: Tensor,
    stops: Sequence[int],
    generator: torch.Generator,
    step_factor: float = 1.0,
) -> list[Tensor]:
    """Chains as in the training after each number of steps, with a factor on α."""
    states = []
    for before, stop in zip((0, *stops), stops, strict=False):
        parts = torch.split(x, TOGETHER)
        more = stop - before
        x = torch.cat([run.chains(p, more, generator, step_factor=step_factor) for p in parts])
        states.append(x)
    return states


def by_run(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of each run, in their order; folders of one name may lie in several places."""
    return [own for _, own in frame.groupby("path", sort=False)]


def by_beta(frame: pd.DataFrame, name: str) -> pd.Series:
    """A number by β*, smallest β* first; of several seeds their median, NaN where one is."""
    values = frame[name].astype(float).groupby(frame["beta_star"])
    return values.agg(lambda own: own.median(skipna=False))


def about(run: TrainedRun) -> str:
    """A run in a line: its folder, its data, β*, how it was trained, and for how long."""
    low, high = run.settings.sgld_steps, run.settings.most_sgld_steps
    steps = f"K = {low}" if low == high else f"K from {low} to {high}"
    if run.config.most_steps > 1:
        steps += f" (in training up to {run.config.most_steps} times as many, as much finer)"
    words = [run.data.name, f"β* = {run.config.beta_star:g}", steps, f"{run.step:,} updates"]
    words += ["persistent chains"] if run.settings.init != "noise" else []
    own = run.settings  # what makes a comparison unfair where runs differ in it
    words += [f"nf {own.nf}", f"{own.optimizer} {own.lr:g}", f"batch {own.batch}"]
    words += [f"α {own.step_size:g}", f"noise {own.noise_std:g}, on data {own.data_noise:g}"]
    return f"{run.name}: {', '.join(words)}"


def named(run: TrainedRun, label: str | None = None) -> dict[str, Any]:
    """What tells a row's run; with a label of :func:`ordered`, what it is ordered by too."""
    own = {ABOUT: about(run), "run": label or run.name, "path": str(run.path)}
    if label is None:
        return own
    return {**own, "seed": run.config.seed, "beta_star": float(run.config.beta_star)}


def ordered(runs: Sequence[TrainedRun]) -> list[tuple[str, TrainedRun]]:
    """Runs of one data set with a short name, the smallest β* first.

    The name is the β*; with the seed where that is not enough; with the folder at last.
    """
    kinds = {f"{r.data.name}, {'x'.join(map(str, r.data.sample_shape))}": r.path for r in runs}
    if len(kinds) > 1:
        raise ConfigError(
            "a picture compares runs of one data set; those given are of several:"
            + "".join(f"\n  {path}: {kind}" for kind, path in kinds.items())
        )
    runs = sorted(runs, key=lambda run: run.config.beta_star)
    names = [f"β* = {run.config.beta_star:g}" for run in runs]
    for more in ([f"seed {run.config.seed}" for run in runs], [run.name for run in runs]):
        parts = zip(names, more, strict=True)
        names = [name if names.count(name) == 1 else f"{name}, {own}" for name, own in parts]
    return [*zip(names, runs, strict=True)]


def check_runs(
    runs: Sequence[TrainedRun],
    figure: str,
    *,
    most: int | None = None,
    held_out: int = 0,
    are_new: bool = True,
) -> None:
    """Refuse runs that a study cannot take, before any of them is worked on.

    Args:
        runs: the runs.
        figure: the study's name.
        most: runs that the picture has room for.
        held_out: test images that each must have.
        are_new: whether chains must start from noise, as they did in the training.
    """
    if most is not None and len(runs) > most:
        raise ConfigError(
            f"the figure has room for {most} runs, and {len(runs)} were given; give fewer"
        )
    for run in runs:
        if are_new and run.settings.init != "noise":
            raise ConfigError(
                f"Figure {figure} draws negatives as in training, from fresh noise; the chains of "
                f"{run.path} were persistent and are not kept. Give runs trained with --init noise."
            )
        there = len(run.data.test_x)
        if held_out > there:
            raise ConfigError(
                f"{held_out} held-out images were asked for, and the data of {run.path} have "
                f"{there}; give a smaller --count"
            )
