"""Runs of `ebmguard train shortrun` in a study: how they are opened, told apart and refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from ..device import find_device
from ..plots.numbers import word
from ..shortrun.trained import TrainedRun, load_run
from .config import ShortRunFigure
from .study import ABOUT

REFERENCES = 500
"""Images of a data set, at most, that samples are held against."""
TOGETHER = 200
"""Chains that are run together: the noise of many steps is drawn at once."""
MEASURES = (
    "Means over the chains. beyond: share of entries outside [-1, 1]; excess: by how much, on the "
    "mean of all entries. ends: share shown as pure black or white. size: mean |x|. contrast: "
    "standard deviation of an image's entries. slope: length of ∇f(x). distance: root mean square "
    "difference to the nearest training image, after cutting to [-1, 1]. Data are training images "
    "with the noise of training"
)
"""What the columns of images in numbers are."""
FREE = ("iterations", "sample_every")
"""Settings that the tables tell otherwise, or that leave the network as it is."""
BEYOND = ("most_steps", "start_from", "precision")
"""What else decides a run's network, and is no part of its preset."""


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


def negatives(
    run: TrainedRun, x0: Tensor, generator: torch.Generator, step_factor: float = 1.0
) -> Tensor:
    """Chains as in the training, of its smallest number of steps, with a factor on α."""
    steps = run.settings.sgld_steps
    parts = torch.split(x0, TOGETHER)
    return torch.cat([run.chains(x, steps, generator, step_factor=step_factor) for x in parts])


def followed(
    run: TrainedRun, x: Tensor, stops: Sequence[int], generator: torch.Generator, together: int
) -> Iterator[Tensor]:
    """Chains after each number of steps; so many at a time, as noise of many steps is drawn."""
    for before, stop in zip((0, *stops), stops, strict=False):
        parts = torch.split(x, together)
        x = torch.cat([run.chains(part, stop - before, generator) for part in parts])
        yield x


def over(found: dict[str, float], data: dict[str, float], name: str) -> float:
    """A mean over that of the data; NaN where that is 0."""
    return found[name] / data[name] if data[name] else math.nan


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
    return f"{run.name}: {', '.join(words)}"


def named(run: TrainedRun) -> dict[str, Any]:
    """What tells a row's run."""
    return {ABOUT: about(run), "run": run.name, "path": str(run.path)}


def ordered(runs: Sequence[TrainedRun]) -> list[tuple[str, TrainedRun]]:
    """Runs of one data set with a short name, the smallest β* first.

    The name is the β*; with the seed where that is not enough; with the folder at last.
    """
    kinds = {run.path: (run.data.name, run.data.sample_shape) for run in runs}
    if len(set(kinds.values())) > 1:
        raise ConfigError(
            "a picture compares runs of one data set; those given are of several:"
            + "".join(
                f"\n  {p}: {n}, {'x'.join(map(str, shape))}" for p, (n, shape) in kinds.items()
            )
        )
    runs = sorted(runs, key=lambda run: run.config.beta_star)
    betas = [f"β* = {run.config.beta_star:g}" for run in runs]
    seeds = [f"{beta}, seed {run.config.seed}" for beta, run in zip(betas, runs, strict=True)]
    found = []
    for beta, seed, run in zip(betas, seeds, runs, strict=True):
        label = beta if betas.count(beta) == 1 else seed
        found.append((label if seeds.count(seed) == 1 else f"{beta}, {run.path.name}", run))
    return found


def caution(runs: Sequence[TrainedRun]) -> str:
    """A sentence on what else than β* the runs differ in; "" where the comparison is a fair one."""
    found = {
        field.name: [getattr(run.settings, field.name) for run in runs]
        for field in dataclasses.fields(runs[0].settings)
        if field.name not in FREE
    }
    found |= {name: [getattr(run.config, name) for run in runs] for name in BEYOND}
    found["updates"] = [run.step for run in runs]
    told = [
        f"{name.replace('_', ' ')} {', '.join(map(word, dict.fromkeys(values)))}"
        for name, values in found.items()
        if len(set(values)) > 1
    ]
    return f"The runs differ in more than β*: {'; '.join(told)}." if told else ""


def check_runs(
    runs: Sequence[TrainedRun],
    figure: str,
    *,
    most: int | None = None,
    held_out: int = 0,
    what: str = "held-out images",
    are_new: bool = True,
) -> None:
    """Refuse runs that a study cannot take, before any of them is worked on.

    Args:
        runs: the runs.
        figure: the study's name.
        most: runs that the picture has room for.
        held_out: test images that each must have.
        what: they are for.
        are_new: whether chains must start from noise, as they did in the training.
    """
    other = [str(run.path) for run in runs if are_new and run.settings.init != "noise"]
    if other:
        raise ConfigError(
            f"Figure {figure} draws negatives as in training, from fresh noise; the chains of "
            f"{', '.join(other)} were persistent and are not kept. Give runs trained with --init "
            "noise."
        )
    if most is not None and len(runs) > most:
        raise ConfigError(
            f"the figure has room for {most} runs, and {len(runs)} were given; give fewer"
        )
    for run in runs:
        there = len(run.data.test_x)
        if held_out > there:
            raise ConfigError(
                f"{held_out} {what} were asked for, and the data of {run.path} have {there} test "
                "images; give a smaller --count"
            )
