"""Figures 13 and 14: f on training data and on fresh negatives, of the usual step size or 4x."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.figure import Made
from ...plots.markdown import NONE, markdown_table
from ...plots.numbers import counted, number
from ...plots.page import heading, legend_above, plain, tiling
from ..trained import TrainedRun
from .chain_energies import LARGER, Energies, measure
from .config import FigureConfig
from .separation import Floats, edges, linear_range, overlap, shares
from .several import caution, from_noise, labels, ordered, unrefined

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COUNT = 1000
"""Images and chains, where there are as many images."""
# All in inches.
WIDTH, HEIGHT = 3.3, 2.2
LEFT, RIGHT, TOP, BETWEEN, BELOW = 0.75, 0.25, 1.25, 0.65, 1.0
COLUMNS = 3
MOST_TICKS = 6


def make(runs: Sequence[TrainedRun], config: FigureConfig) -> Made:
    """Figure 13 or 14 of the robust objective's paper.

    Raises:
        ConfigError: the runs are of several data sets, or a run's chains were persistent.
    """
    runs = ordered(runs)
    from_noise(runs, f"Figure {config.name}")
    factors = (1.0, LARGER) if config.name == "14" else (1.0,)
    count = COUNT if config.count is None else config.count
    found = [
        measure(run, label, count, config.seed, factors)
        for run, label in zip(runs, labels(runs), strict=True)
    ]
    said = statement(found)
    title = f"Figure {config.name}: f on {runs[0].data.name} and on negatives of SGLD"
    return Made(
        figure=draw(found, title + (f", step size × {LARGER:g}" if len(factors) > 1 else "")),
        text="\n\n".join(filter(None, [table(found), said, caution(runs), unrefined(runs)])),
        numbers={
            "runs": [_numbers(run, own) for run, own in zip(runs, found, strict=True)],
            "statement": said,
        },
    )


def statement(found: Sequence[Energies]) -> str:
    """What the runs say of the paper's claim on the figure."""
    if LARGER in found[0].negatives:
        rises = ", ".join(f"{number(own.rise)} at {own.beta_star:g}" for own in found)
        tops = ", ".join(
            f"{number(own.separation(LARGER).above)} (before: {number(own.separation(1.0).above)})"
            for own in found
        )
        return (
            f"The paper: with {LARGER:g} times the step size negatives reach much higher f. Here "
            "their mean f rises, in standard deviations of f on data, by (per β*): "
            f"{rises}. The share of pairs in which f(x⁻) > f(x⁺) becomes {tops}."
        )
    both = [(own, own.separation(1.0)) for own in found]
    listed = ", ".join(f"{number(s.overlap)} at {own.beta_star:g}" for own, s in both)
    return (
        "The paper: negatives and data differ in f, the more the larger β is. Here the overlap of "
        f"their histograms is (per β*): {listed}."
    )


def table(found: Sequence[Energies]) -> str:
    """The distributions in numbers, a line for each run and step size."""
    larger = LARGER in found[0].negatives
    head = ["run", "step size", "f(x⁺)", "std", "f(x⁺) clean", "f(x⁻)", "std", "gap"]
    head += ["P(f⁻ > f⁺)", "overlap", "not finite", *(["rise"] if larger else [])]
    rows = []
    for own in found:
        clean = own.clean[np.isfinite(own.clean)]
        for factor in own.negatives:
            s = own.separation(factor)
            of_data = (s.data_mean, s.data_std, float(clean.mean()) if len(clean) else math.nan)
            values = (*of_data, s.mean, s.std, s.gap, s.above, s.overlap)
            row = [own.label, f"× {factor:g}", *map(number, values)]
            row.append(counted(s.not_finite))
            if larger:
                row.append(NONE if factor == 1 else number(own.rise))
            rows.append(row)
    images = len(found[0].data)
    notes = [
        f"Means and standard deviations of f, of {images:,} training images with the training's "
        "noise and as many chains; P(f⁻ > f⁺) of all pairs, 0.5 where they cannot be told apart; "
        "overlap of the histograms, 1 where they are the same. Few values of one distribution "
        f"overlap less: two halves of the first run's f(x⁺) by {number(_halves(found[0].data))}."
    ]
    if larger:
        notes.append("Rise: of the mean f(x⁻), in standard deviations of f(x⁺).")
    if any(own.separation(f).not_finite for own in found for f in own.negatives):
        notes.append("Chains whose f is not finite are counted, and left out of all else.")
    return "\n\n".join([markdown_table(head, rows, words=2), " ".join(notes)])


def _halves(values: Floats) -> float:
    """The overlap of every other value with the rest: what chance alone leaves of 1."""
    known = values[np.isfinite(values)]
    return overlap(known[::2], known[1::2])


def draw(found: Sequence[Energies], title: str) -> Figure:
    """A panel for each run, each on its own axes: f less its mean on data.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows, columns = tiling(len(found), COLUMNS)
    inside = columns * (WIDTH + BETWEEN) - BETWEEN
    width = max(LEFT + inside + RIGHT, 6.4)
    canvas = Canvas(width, TOP + rows * (HEIGHT + BELOW))
    left = (width - inside + LEFT - RIGHT) / 2
    heading(canvas, title, "f is known up to a constant: 0 is its mean on data")
    for i, own in enumerate(found):
        x = left + i % columns * (WIDTH + BETWEEN)
        y = TOP + i // columns * (HEIGHT + BELOW)
        axes = canvas.axes(x, y, WIDTH, HEIGHT)
        words = _draw_histograms(axes, own)
        plain(axes, own.label, words, "" if i % columns else "share of images (%)")
    legend_above(canvas, 0.8, _legend(list(found[0].negatives)))
    return canvas.figure


def _draw_histograms(axes: Axes, own: Energies) -> str:
    """What stands below them."""
    centre = own.separation(1.0).data_mean
    data = own.data[np.isfinite(own.data)] - centre
    chains = {f: values[np.isfinite(values)] - centre for f, values in own.negatives.items()}
    samples = [data, *chains.values()]
    if not len(data):
        axes.text(0.5, 0.5, "f is finite nowhere on data", transform=axes.transAxes, ha="center")
        return ""
    bins = edges(*samples)
    for style, sample in zip(_styles(list(chains)), samples, strict=True):
        axes.stairs(100 * shares(sample, bins), bins, **style)
    axes.set_ylim(bottom=0)
    label = "f − mean f(x⁺)"
    linear = linear_range(*samples)
    if linear is None:
        axes.locator_params(axis="x", nbins=5)
    else:
        axes.set_xscale("symlog", linthresh=linear)
        axes.set_xticks(symlog_ticks(bins[0], bins[-1], linear))
        axes.set_xticks([], minor=True)
        label += f", symlog, linear up to ±{linear:g}"
    last = own.separation(max(chains))
    words = f"P(f⁻ > f⁺) = {number(last.above)}"
    if len(chains) > 1:
        words += f" (× 1: {number(own.separation(1.0).above)})"
    if last.not_finite:
        words += f"; {last.not_finite:,} of {len(own.data):,} not finite"
    return f"{label}\n{words}"


def symlog_ticks(low: float, high: float, linear: float) -> list[float]:
    """0 and powers of ten from `linear` on, so far apart that their labels have room.

    Args:
        low, high: ends of a matplotlib axis "symlog" of base 10, with 0 between them.
        linear: a power of ten, its `linthresh`.
    """
    edge = 1 / (1 - 1 / 10)  # where the linear part ends, in lengths of a decade

    def place(size: float) -> float:
        return edge * size / linear if size < linear else edge + math.log10(size / linear)

    spacing = (place(max(0.0, high)) + place(max(0.0, -low))) / MOST_TICKS
    ticks = [0.0]
    for sign, end in ((1, high), (-1, -low)):
        last = 0.0
        for k in range(1 + math.floor(math.log10(end / linear)) if end >= linear else 0):
            if edge + k - last >= spacing:
                ticks.append(sign * linear * 10.0**k)
                last = edge + k
    return sorted(ticks)


def _styles(factors: Sequence[float]) -> list[dict[str, Any]]:
    styles: list[dict[str, Any]] = [{"fill": True, "color": COLOURS[0], "alpha": 0.55}]
    for i in range(len(factors)):
        if i == len(factors) - 1:
            styles.append({"fill": True, "color": COLOURS[1], "alpha": 0.55})
        else:
            # The training's own negatives, for comparison, do not hide the others.
            styles.append({"fill": False, "color": DARK, "lw": 1.1, "ls": "--"})
    return styles


def _legend(factors: Sequence[float]) -> list[Any]:
    from matplotlib.patches import Patch

    each = [f", step size × {factor:g}" if len(factors) > 1 else "" for factor in factors]
    labels = ["data", *(f"negatives{words}" for words in each)]
    styles = _styles(factors)
    return [Patch(label=label, **style) for label, style in zip(labels, styles, strict=True)]


def _numbers(run: TrainedRun, own: Energies) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "path": str(run.path),
        "seed": run.config.seed,
        "beta_star": own.beta_star,
        "images": len(own.data),
        "step_size": {
            f"{factor:g}": asdict(s) | {"gap": s.gap}
            for factor, s in ((f, own.separation(f)) for f in own.negatives)
        },
    }
    return numbers | ({"rise": own.rise} if LARGER in own.negatives else {})
