"""What the studies of `ebmguard train shortrun` share: their runs, their rows, their pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from ebmguard.errors import ConfigError

from ..device import find_device
from ..plots.canvas import DARK, new_figure, plain, tiling
from ..plots.images import sample_grid
from ..shortrun.trained import TrainedRun, load_run
from .config import ShortRunFigure
from .study import ABOUT, frame_of

REFERENCES = 500
"""Images of a data set, at most, that samples are held against."""
TOGETHER = 200
"""Chains that are run together: the noise of many steps is drawn at once."""
WIDTH = 11.5
"""Of a picture, in inches."""


def opened(config: ShortRunFigure) -> list[TrainedRun]:
    """The runs that the command names."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    return [load_run(path, device, config.data_root) for path in dict.fromkeys(config.runs)]


def each(
    runs: Sequence[TrainedRun],
    config: ShortRunFigure,
    rows: Callable[[TrainedRun, int, torch.Generator], Iterable[Mapping[str, Any]]],
    count: int,
    *,
    most: int | None = None,
    held_out: bool = False,
    persistent: bool = False,
    by_beta_star: bool = False,
) -> pd.DataFrame:
    """The rows of every run, after all runs have been found to be such as the study takes.

    Args:
        runs: the runs.
        config: the settings of the command.
        rows: (run, how many images or chains, generator) -> its rows.
        count: images or chains where the command does not say it.
        most: runs that the picture has room for.
        held_out: whether there must be as many test images; by themselves they are no more.
        persistent: whether runs may be taken whose chains did not start from noise.
        by_beta_star: whether runs are of one data set, ordered and named by β*.
    """
    if most is not None and len(runs) > most:
        raise ConfigError(
            f"the figure has room for {most} runs, and {len(runs)} were given; give fewer"
        )
    for run in runs:
        if not persistent and run.settings.init != "noise":
            raise ConfigError(
                f"Figure {config.name} draws negatives as in training, from fresh noise; the "
                f"chains of {run.path} were persistent and are not kept. Give runs trained with "
                "--init noise."
            )
        there = len(run.data.test_x)
        if held_out and (config.count or 0) > there:
            raise ConfigError(
                f"{config.count} held-out images were asked for, and the data of {run.path} have "
                f"{there}; give a smaller --count"
            )
        count = min(count, there) if held_out else count
    names = ordered(runs) if by_beta_star else [(run.name, run) for run in runs]
    found = []
    for label, run in names:
        own: dict[str, Any] = {ABOUT: about(run), "run": label, "path": str(run.path)}
        if by_beta_star:
            own |= {"seed": run.config.seed, "beta_star": float(run.config.beta_star)}
        generator = torch.Generator(run.device).manual_seed(config.seed)
        found += [own | {**row} for row in rows(run, config.count or count, generator)]
    frame = frame_of(found)
    if by_beta_star:
        frame.attrs["data"] = runs[0].data.name
    return frame


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


def about(run: TrainedRun) -> str:
    """A run in a line: its folder, its data, β*, how it was trained, and for how long."""
    low, high = run.settings.sgld_steps, run.settings.most_sgld_steps
    steps = f"K = {low}" if low == high else f"K from {low} to {high}"
    words = [run.data.name, f"β* = {run.config.beta_star:g}", steps, f"{run.step:,} updates"]
    words += ["persistent chains"] if run.settings.init != "noise" else []
    own = run.settings  # what makes a comparison unfair where runs differ in it
    words += [f"nf {own.nf}", f"{own.optimizer} {own.lr:g}", f"batch {own.batch}"]
    words += [f"α {own.step_size:g}", f"noise {own.noise_std:g}, on data {own.data_noise:g}"]
    return f"{run.name}: {', '.join(words)}"


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
    run: TrainedRun, x: Tensor, stops: Sequence[int], generator: torch.Generator, factor: float = 1
) -> list[Tensor]:
    """Chains as in the training after each number of steps, with a factor on α."""
    states = []
    for before, stop in zip((0, *stops), stops, strict=False):
        parts = torch.split(x, TOGETHER)
        own = [run.chains(p, stop - before, generator, step_factor=factor) for p in parts]
        states.append(x := torch.cat(own))
    return states


def by_run(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of each run, in their order; folders of one name may lie in several places."""
    return [own for _, own in frame.groupby("path", sort=False)]


def by_beta(frame: pd.DataFrame, name: str) -> pd.Series:
    """A number by β*, smallest β* first; of several seeds their median, NaN where one is."""
    values = frame[name].astype(float).groupby(frame["beta_star"])
    return values.agg(lambda own: own.median(skipna=False))


# -- pictures ---------------------------------------------------------------------------------


def picture(
    title: str, words: str, heights: Sequence[float], width: float = WIDTH
) -> tuple[Figure, list[SubFigure]]:
    """Bands of about so many inches under a title, and a line of words at the foot."""
    figure = new_figure(width, sum(heights) + 0.8)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(words, fontsize=9, color=DARK)
    bands = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)
    return figure, [*bands.flat]


def tiles(band: SubFigure, count: int, most: int, *, sharey: bool = False) -> list[Axes]:
    """Axes in even rows, at most so many in each."""
    rows, columns = tiling(count, most)
    axes = band.subplots(rows, columns, squeeze=False, sharey=sharey).ravel()
    for empty in axes[count:]:
        empty.remove()
    return [*axes[:count]]


def strip(axes: Axes, rows: Sequence[tuple[str, Tensor]], heads: Sequence[str] = ()) -> float:
    """Rows of as many images each, a label on the left of each and a head above each column.

    Returns:
        how wide an image is in the units of the axes, which begin at -0.5.
    """
    images = torch.cat([own for _, own in rows])
    columns = len(images) // len(rows)
    shown = sample_grid(images, columns=columns, zoom=max(1, 64 // images.shape[-1]))
    axes.imshow(shown, interpolation="nearest")
    axes.set_frame_on(False)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=DARK, labeltop=True, labelbottom=False)
    tall, wide = shown.shape[0] / len(rows), shown.shape[1] / columns
    axes.set_yticks((np.arange(len(rows)) + 0.5) * tall, [label for label, _ in rows])
    axes.set_xticks((np.arange(len(heads)) + 0.5) * wide, heads)
    return float(wide)


def curves(
    band: SubFigure,
    caption: str,
    drawn: Mapping[str, Callable[[Axes], object]],
    xlabel: str,
    legend: Sequence[Artist],
    columns: int = 1,
) -> None:
    """Panels of the curves of all runs, by their titles."""
    for axes, (title, draw) in zip(tiles(band, len(drawn), 3), drawn.items(), strict=True):
        axes.yaxis.set_major_formatter("{x:.4g}")
        draw(axes)
        plain(axes, title, xlabel)
    band.suptitle(caption, fontsize=9, color=DARK)
    style: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": 9}
    band.legend(handles=legend, loc="outside lower center", **style)
