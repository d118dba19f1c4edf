"""f on training data and on fresh negatives: Figures 13 and 14 of Appendix L."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ..judge.ood import auroc
from ..plots.canvas import COLOURS, DARK
from ..plots.numbers import number
from ..plots.page import grid, legend_above, plain
from ..shortrun.trained import TrainedRun
from .config import ShortRunFigure
from .shortrun import (
    about,
    by_beta,
    by_run,
    caution,
    check_runs,
    negatives,
    noisy,
    opened,
    ordered,
    some_of,
)
from .study import ABOUT, Study, ascending, frame_of

Floats = NDArray[np.float64]

COUNT = 1000
"""Images and chains, where there are as many images."""
LARGER = 4.0
"""Of Figure 14: the factor on the SGLD step size α."""
MOST_TICKS = 6
BINS = 50
WIDE = 30.0
"""How many standard deviations of the data the bins may span and be of one width."""


def energies(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """f on training images with the training's noise and on fresh negatives: Figures 13 and 14.

    Data have the noise of the training, which f was raised on. At every step size chains have the
    same starts and noise.
    """
    found = ordered(runs)
    check_runs(runs, config.name)
    factors = (1.0, LARGER) if config.name == "14" else (1.0,)
    count = config.count or COUNT
    rows: list[dict[str, Any]] = []
    for label, run in found:
        generator = torch.Generator(run.device).manual_seed(config.seed)
        clean = some_of(run, run.data.train_x, generator, count)
        data = noisy(run, clean, generator)
        starts = run.starts(len(clean), generator)
        state = generator.get_state()
        f_pos, f_clean = (run.energies(x).double().cpu().numpy() for x in (data, clean))
        known = f_clean[np.isfinite(f_clean)]
        own = {
            ABOUT: about(run),
            "run": label,
            "path": str(run.path),
            "seed": run.config.seed,
            "beta_star": float(run.config.beta_star),
            "images": len(data),
            "clean_mean": float(known.mean()) if len(known) else math.nan,
        }
        plain_mean = math.nan
        for factor in factors:
            generator.set_state(state)
            f_neg = run.energies(negatives(run, starts, generator, factor)).double().cpu().numpy()
            apart = separation(f_pos, f_neg)
            row = {**own, "step_size": factor, **apart, "f_pos": f_pos, "f_neg": f_neg}
            if factor == 1:
                plain_mean = apart["mean"]
            else:
                row["rise"] = rise(apart["mean"] - plain_mean, apart["data_std"])
            rows.append(row)
    frame = frame_of(rows)
    f_pos = rows[0]["f_pos"][np.isfinite(rows[0]["f_pos"])]
    chance = overlap(f_pos[::2], f_pos[1::2])
    note = (
        "Few values of one distribution overlap less than 1: two halves of the first run's f(x⁺) "
        f"by {number(chance)}. {caution(runs)}"
    )
    frame.attrs |= {"note": note, "data": runs[0].data.name}
    return frame


def rise(difference: float, spread: float) -> float:
    """A difference in standard deviations of f⁺; infinite or NaN where f⁺ does not vary."""
    return difference / spread if spread else difference * math.inf


def separation(data: Floats, negatives: Floats) -> dict[str, float]:
    """f on data, (N,), beside f on negatives, (M,): of the finite values, NaN where there are none.

    Returns:
        "data_mean", "data_std", "mean" and "std"; "gap", mean f⁺ − mean f⁻; "above", P(f⁻ > f⁺),
        half of ties included; "overlap" of the histograms, 1 where they are the same; and
        "not_finite", how many f⁻ are not finite.
    """
    lost = int((~np.isfinite(negatives)).sum())
    data, negatives = data[np.isfinite(data)], negatives[np.isfinite(negatives)]
    (data_mean, data_std), (mean, std) = mean_std(data), mean_std(negatives)
    return {
        "data_mean": data_mean,
        "data_std": data_std,
        "mean": mean,
        "std": std,
        "gap": data_mean - mean,
        "above": auroc(torch.from_numpy(negatives), torch.from_numpy(data)),
        "overlap": overlap(data, negatives),
        "not_finite": lost,
    }


def mean_std(values: Floats) -> tuple[float, float]:
    """Mean and standard deviation (of a population); NaN of no values."""
    return (float(values.mean()), float(values.std())) if len(values) else (math.nan, math.nan)


def overlap(data: Floats, negatives: Floats) -> float:
    """Sum over bins of the smaller share; NaN where there is no value on one side."""
    if not len(data) or not len(negatives):
        return math.nan
    bins = edges(data, negatives)
    return float(np.minimum(shares(data, bins), shares(negatives, bins)).sum())


def shares(values: Floats, bins: Floats) -> Floats:
    """What share of all values falls into each bin, (B,); all are of finite values."""
    return np.histogram(values, bins)[0] / max(1, len(values))


def linear_range(*samples: Floats) -> float | None:
    """Up to where a common axis around the data's mean is linear, and logarithmic beyond.

    Args:
        *samples: finite values, the data's first.

    Returns:
        a power of ten, of one to ten standard deviations of the data; None where all of the axis is
        linear, because no value lies far from the data.
    """
    spread = mean_std(samples[0])[1]
    if not spread > 0 or np.ptp(np.concatenate(samples)) <= WIDE * spread:
        return None
    return float(10.0 ** math.ceil(math.log10(spread)))


def edges(*samples: Floats) -> Floats:
    """Edges of common bins, (BINS + 1,): of one width on the axis of :func:`linear_range`.

    That axis is asinh((f − mean of the data) / its linear range). The samples are finite values,
    those of the data first, of which there is at least one.
    """
    everything = np.concatenate(samples)
    low, high = float(everything.min()), float(everything.max())
    if low == high:
        # All values are one: a bin around it, as wide as floats of its size can tell apart.
        half = max(abs(low), 1.0) * 1e-6
        return np.linspace(low - half, high + half, BINS + 1)
    linear = linear_range(*samples)
    if linear is None:
        return np.linspace(low, high, BINS + 1)
    centre = float(samples[0].mean())
    first, last = (math.asinh((end - centre) / linear) for end in (low, high))
    found: Floats = centre + linear * np.sinh(np.linspace(first, last, BINS + 1))
    # Rounding must not leave the extremes outside.
    found[[0, -1]] = low, high
    return found


def draw_energies(frame: pd.DataFrame, title: str) -> Figure:
    """A panel for each run, each on its own axes: f less its mean on data."""
    groups = [own.to_dict("records") for own in by_run(frame)]
    canvas, panels = grid(
        title,
        "f is known up to a constant: 0 is its mean on data",
        len(groups),
        3,
        (3.3, 2.2),
        sides=(0.75, 0.65, 0.25),
        top=1.25,
        below=1.0,
        least=6.4,
    )
    factors = [row["step_size"] for row in groups[0]]
    styles: list[dict[str, Any]] = [{"fill": True, "color": COLOURS[0], "alpha": 0.55}]
    # The training's own negatives, for comparison, do not hide the others.
    styles += [{"fill": False, "color": DARK, "lw": 1.1, "ls": "--"}] * (len(factors) - 1)
    styles.append({"fill": True, "color": COLOURS[1], "alpha": 0.55})
    first = panels[0].get_position().x0
    for axes, rows in zip(panels, groups, strict=True):
        words = _draw_histograms(axes, rows, styles)
        ylabel = "share of images (%)" if axes.get_position().x0 == first else ""
        plain(axes, rows[0]["run"], words, ylabel)
    each = [f", step size × {factor:g}" if len(factors) > 1 else "" for factor in factors]
    labels = ["data", *(f"negatives{words}" for words in each)]
    patches = [Patch(label=label, **style) for label, style in zip(labels, styles, strict=True)]
    legend_above(canvas, 0.8, patches)
    return canvas.figure


def _draw_histograms(axes: Axes, rows: list[dict[str, Any]], styles: list[dict[str, Any]]) -> str:
    """What stands below them."""
    samples = [x[np.isfinite(x)] for x in (rows[0]["f_pos"], *(row["f_neg"] for row in rows))]
    if not len(samples[0]):
        axes.text(0.5, 0.5, "f is finite nowhere on data", transform=axes.transAxes, ha="center")
        return ""
    samples = [sample - rows[0]["data_mean"] for sample in samples]
    bins = edges(*samples)
    for style, sample in zip(styles, samples, strict=True):
        axes.stairs(100 * shares(sample, bins), bins, **style)
    axes.set_ylim(bottom=0)
    label, linear = "f − mean f(x⁺)", linear_range(*samples)
    if linear is None:
        axes.locator_params(axis="x", nbins=5)
    else:
        axes.set_xscale("symlog", linthresh=linear)
        axes.set_xticks(symlog_ticks(bins[0], bins[-1], linear))
        axes.set_xticks([], minor=True)
        label += f", symlog, linear up to ±{linear:g}"
    words = f"P(f⁻ > f⁺) = {number(rows[-1]['above'])}"
    if len(rows) > 1:
        words += f" (× 1: {number(rows[0]['above'])})"
    if rows[-1]["not_finite"]:
        words += f"; {rows[-1]['not_finite']:,} of {rows[0]['images']:,} not finite"
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


_COLUMNS = (
    "Of as many training images, with the training's noise, as chains: data_mean, data_std, mean "
    "and std of f(x⁺) and f(x⁻); clean_mean of the images without noise; above, P(f⁻ > f⁺) of all "
    "pairs, 0.5 where they cannot be told apart; overlap of the histograms, 1 where they are the "
    "same. Chains whose f is not finite are counted, and left out of all else."
)
STUDIES = {
    "13": Study(
        "Figure 13: f on data and on negatives of SGLD",
        "robust objective, Appendix L, Figure 13",
        opened,
        energies,
        draw_energies,
        _COLUMNS,
        "negatives and data differ in f, the more the larger β* is",
        lambda frame: ascending((-by_beta(frame, "overlap")).tolist()),
    ),
    "14": Study(
        "Figure 14: f on data and on negatives of SGLD, step size × 4",
        "robust objective, Appendix L, Figure 14",
        opened,
        energies,
        draw_energies,
        f"{_COLUMNS} rise: of the mean f(x⁻), in standard deviations of f(x⁺).",
        "with 4 times the step size negatives reach higher f in every run",
        lambda frame: ascending([0.0, frame["rise"].dropna().min()]),
    ),
}
