"""Several runs in one picture: their order, their labels, and whether they can be compared."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from ...plots.numbers import word
from ..trained import TrainedRun

TOGETHER = 200
"""Chains that are run together: the noise of many steps is drawn at once."""
FREE = ("iterations", "sample_every")
"""Settings that the tables tell otherwise, or that leave the network as it is."""
BEYOND = ("most_steps", "start_from", "precision")
"""What else decides a run's network, and is no part of its preset."""


def ordered(runs: Sequence[TrainedRun]) -> list[TrainedRun]:
    """Runs of one data set, the smallest β* first; runs of one β* as they were given.

    Raises:
        ConfigError: their images are not of one data set and size.
    """
    kinds = {run.path: (run.data.name, run.data.sample_shape) for run in runs}
    if len(set(kinds.values())) > 1:
        lines = [
            f"{path}: {name}, {'x'.join(map(str, shape))}" for path, (name, shape) in kinds.items()
        ]
        raise ConfigError(
            "a picture compares runs of one data set; those given are of several:\n  "
            + "\n  ".join(lines)
        )
    return sorted(runs, key=lambda run: run.config.beta_star)


def labels(runs: Sequence[TrainedRun]) -> list[str]:
    """A short name of each run: its β*; its seed where that is not enough; its folder at last."""
    of_beta = [f"β* = {run.config.beta_star:g}" for run in runs]
    of_seed = [f"{beta}, seed {run.config.seed}" for beta, run in zip(of_beta, runs, strict=True)]
    betas, seeds = Counter(of_beta), Counter(of_seed)
    return [
        beta if betas[beta] == 1 else seed if seeds[seed] == 1 else f"{beta}, {run.path.name}"
        for beta, seed, run in zip(of_beta, of_seed, runs, strict=True)
    ]


def other_differences(runs: Sequence[TrainedRun]) -> list[str]:
    """What else than β* the runs differ in, in words; empty where the comparison is a fair one."""
    found = {
        field.name: [getattr(run.settings, field.name) for run in runs]
        for field in dataclasses.fields(runs[0].settings)
        if field.name not in FREE
    }
    found |= {name: [getattr(run.config, name) for run in runs] for name in BEYOND}
    found["updates"] = [run.step for run in runs]
    return [
        f"{name.replace('_', ' ')} {', '.join(map(word, dict.fromkeys(values)))}"
        for name, values in found.items()
        if len(set(values)) > 1
    ]


def caution(runs: Sequence[TrainedRun]) -> str:
    """A sentence on :func:`other_differences`; "" where there are none."""
    found = other_differences(runs)
    return f"The runs differ in more than β*: {'; '.join(found)}." if found else ""


def unrefined(runs: Sequence[TrainedRun]) -> str:
    """A sentence on runs that could train with finer steps than their chains here have; or ""."""
    finer = [run for run in runs if run.config.most_steps > 1]
    if not finer:
        return ""
    told = ", ".join(f"{run.name} {run.config.most_steps}" for run in finer)
    return (
        "Chains here have the K steps of the settings; in training there may have been more, each "
        f"as much finer, up to so many times: {told}."
    )


def negatives(
    run: TrainedRun, x0: Tensor, generator: torch.Generator, step_factor: float = 1.0
) -> Tensor:
    """Chains as in the training, of its smallest number of steps, some at a time.

    Args:
        run: whose chains.
        x0: where they start, (n, C, H, W).
        generator: of the noise.
        step_factor: on the step size α.

    Returns:
        (n, C, H, W).
    """
    steps = run.settings.sgld_steps
    parts = torch.split(x0, TOGETHER)
    return torch.cat([run.chains(x, steps, generator, step_factor=step_factor) for x in parts])


def from_noise(runs: Sequence[TrainedRun], figure: str) -> None:
    """Refuse runs whose negatives do not start from noise.

    Args:
        runs: the runs.
        figure: what needs it, for the message.

    Raises:
        ConfigError: a run's chains went on from update to update.
    """
    other = [run for run in runs if run.settings.init != "noise"]
    if other:
        raise ConfigError(
            f"{figure} draws negatives as in training, from fresh noise; the chains of "
            f"{', '.join(str(run.path) for run in other)} were persistent and are not kept. Give "
            "runs trained with --init noise."
        )


def at_most(runs: Sequence[TrainedRun], most: int) -> None:
    """Refuse more runs than a picture has room for.

    Raises:
        ConfigError: there are more.
    """
    if len(runs) > most:
        raise ConfigError(
            f"the figure has room for {most} runs, and {len(runs)} were given; give fewer"
        )


def enough_held_out(runs: Sequence[TrainedRun], count: int) -> None:
    """Refuse runs with too few held-out images, before any of them is worked on.

    Raises:
        ConfigError: names the run, how many were asked for and how many there are.
    """
    for run in runs:
        there = len(run.data.test_x)
        if count > there:
            raise ConfigError(
                f"{count} held-out images were asked for, and the data of {run.path} have "
                f"{there}; give a smaller --count"
            )
