"""Figure 15: samples of every run from the same noise, beside training images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...plots.canvas import DARK, Canvas
from ...plots.figure import Made
from ...plots.markdown import NONE, Columns, cells, heads, markdown_table
from ...plots.numbers import counted, number
from ...plots.page import show, tiling
from ..trained import TrainedRun
from .config import FigureConfig
from .several import caution, from_noise, labels, negatives, ordered, unrefined

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNT = 64
"""Samples of each run, as in the paper."""
REFERENCE = 1000
"""Training images that samples are compared with, where there are as many."""

# All in inches.
PANEL, BETWEEN, CAPTION, TOP, BELOW = 3.0, 0.2, 0.4, 0.5, 0.15
COLUMNS = 3

NUMBERS: Columns = {
    "distance": ("energy distance", number),
    "mean": ("pixel mean", number),
    "std": ("std", number),
    "beyond": ("beyond", number),
    "not_finite": ("not finite", counted),
}
"""Columns of the table."""


@dataclass(frozen=True)
class Quality:
    """Some images beside training images.

    Attributes:
        distance: energy distance to the training images, per pixel; NaN where a pixel is not
            finite.
        mean, std: of all pixels; NaN likewise.
        beyond: how far pixels lie beyond [-1, 1], on average over all; NaN likewise.
        not_finite: images with a pixel that is not finite.
    """

    distance: float
    mean: float
    std: float
    beyond: float
    not_finite: int


def make(runs: Sequence[TrainedRun], config: FigureConfig) -> Made:
    """Figure 15 of the robust objective's paper.

    Raises:
        ConfigError: the runs are of several data sets, or a run's chains were persistent.
    """
    runs = ordered(runs)
    from_noise(runs, "Figure 15")
    count = COUNT if config.count is None else config.count
    images, reference, held_out = pictures(runs[0], count, config.seed)
    names = labels(runs)
    samples = [draw_samples(run, count, config.seed) for run in runs]
    judged = [quality(x, reference) for x in samples]
    real = quality(held_out, reference)
    said = statement(runs, judged, real)
    title = f"Figure 15: negatives of SGLD from the same noise, {runs[0].data.name}"
    words = [table(names, runs, judged, real, len(reference)), said]
    return Made(
        figure=draw({"training images": images, **dict(zip(names, samples, strict=True))}, title),
        text="\n\n".join(filter(None, [*words, caution(runs), unrefined(runs)])),
        numbers={
            "runs": [
                {
                    "path": str(run.path),
                    "seed": run.config.seed,
                    "beta_star": float(run.config.beta_star),
                    "samples": count,
                    **asdict(own),
                }
                for run, own in zip(runs, judged, strict=True)
            ],
            "test_images": {"images": len(held_out), **asdict(real)},
            "statement": said,
        },
    )


def pictures(run: TrainedRun, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images of the run's data, in [-1, 1].

    Returns:
        training images to show and others to compare with, none in both; and test images. So many
        as are asked for, or fewer where there are fewer.
    """
    generator = torch.Generator(run.device).manual_seed(seed)
    train = run.data.train_x
    order = torch.randperm(len(train), generator=generator, device=run.device)
    shown = min(count, len(train) // 2)
    return (
        run.data.scale(train[order[:shown]]),
        run.data.scale(train[order[shown : shown + REFERENCE]]),
        run.data.scale(run.data.test_x[:count]),
    )


def draw_samples(run: TrainedRun, count: int, seed: int) -> Tensor:
    """Negatives of a run, (count, C, H, W); runs of one size and seed share starts and noise."""
    generator = torch.Generator(run.device).manual_seed(seed)
    return negatives(run, run.starts(count, generator), generator)


def quality(images: Tensor, reference: Tensor) -> Quality:
    """Judge images, (N, C, H, W), by training images, (M, C, H, W)."""
    finite = images.isfinite()
    known = bool(finite.all())
    x = images.double()
    return Quality(
        distance=energy_distance(x.clamp(-1, 1), reference.double()) if known else math.nan,
        mean=float(x.mean()) if known else math.nan,
        std=float(x.std(correction=0)) if known else math.nan,
        beyond=float((x - x.clamp(-1, 1)).abs().mean()) if known else math.nan,
        not_finite=int((~finite.flatten(1).all(1)).sum()),
    )


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|X − Y| − E|X − X'| − E|Y − Y'|, with |·| the root mean square over pixels.

    Zero in expectation where both are of one distribution, else positive (Székely & Rizzo 2013);
    without bias, so that it may come out a little below zero. In pixels, not in features: it sees
    noise and a wrong brightness, and says little of what is depicted.

    Args:
        x: (N, ...).
        y: (M, ...).

    Returns:
        the distance; NaN where N or M is less than 2.
    """
    if min(len(x), len(y)) < 2:
        return math.nan
    x, y = x.flatten(1), y.flatten(1)
    # Without the shortcut by products of matrices, which loses digits of small distances.
    far = partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
    between = far(x, y).mean()
    within = [far(z, z).sum() / (len(z) * (len(z) - 1)) for z in (x, y)]
    return float((2 * between - within[0] - within[1]) / math.sqrt(x.shape[1]))


def statement(runs: Sequence[TrainedRun], judged: Sequence[Quality], real: Quality) -> str:
    """What the numbers say of the paper's claim; of what is depicted the picture alone does."""
    listed = ", ".join(
        f"{number(own.distance)} at {run.config.beta_star:g}"
        for run, own in zip(runs, judged, strict=True)
    )
    return (
        "The paper: the visual quality of the negatives degrades as β increases. Their energy "
        f"distance in pixels to training images is here (per β*): {listed}; that of test images "
        f"is {number(real.distance)}."
    )


def table(
    names: Sequence[str],
    runs: Sequence[TrainedRun],
    judged: Sequence[Quality],
    real: Quality,
    reference: int,
) -> str:
    """A line for each run, and one for test images."""
    rows = [
        [name, f"{run.step:,}", str(run.settings.sgld_steps), *cells(NUMBERS, asdict(own))]
        for name, run, own in zip(names, runs, judged, strict=True)
    ]
    rows.append(["test images", NONE, NONE, *cells(NUMBERS, asdict(real))])
    note = (
        f"Energy distance, in pixels, to {reference:,} training images that are not shown. "
        "Beyond: how far pixels lie beyond [-1, 1], on average; they are clipped when drawn and "
        "compared. Pixels that are not finite are red."
    )
    head = ["images", "updates", "K", *heads(NUMBERS)]
    return f"{markdown_table(head, rows)}\n\n{note}"


def draw(panels: dict[str, Tensor], title: str) -> Figure:
    """Grids of images, by what stands above them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows, columns = tiling(len(panels), COLUMNS)
    canvas = Canvas(BETWEEN + columns * (PANEL + BETWEEN), TOP + rows * (PANEL + CAPTION) + BELOW)
    canvas.write(canvas.width / 2, 0.3, title, fontsize=12)
    for i, (name, images) in enumerate(panels.items()):
        x = BETWEEN + i % columns * (PANEL + BETWEEN)
        y = TOP + i // columns * (PANEL + CAPTION)
        canvas.write(x + PANEL / 2, y + CAPTION / 2, name, fontsize=10.5, color=DARK)
        square = math.isqrt(len(images) - 1) + 1
        show(canvas, x, y + CAPTION, images, PANEL / square, square)
    return canvas.figure
