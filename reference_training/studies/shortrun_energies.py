"""f on data and on negatives, during training and after it: Figures 12 to 14 of Appendix L."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ebmguard import tags
from ebmguard.errors import ConfigError

from ..engine.run_folder import METRICS, series
from ..judge.ood import auroc
from ..plots.canvas import COLOURS, DARK
from ..plots.numbers import number
from ..plots.page import grid, legend_above, plain
from ..shortrun.trained import TrainedRun
from . import shortrun
from .config import ShortRunFigure
from .study import Study, ascending, frame_of

Floats = NDArray[np.float64]

PAPERS_EVERY, LEAST_POINTS = 100, 100
"""Updates between the batches that the paper shows; fewer, where a curve had not so many points."""
WINDOWS = 50
"""Points of a curve of the gap, each the quartiles of as many updates."""
SPREAD = 20.0
"""How many times as far the widest run may spread as the narrowest, on an axis that is linear."""
COUNT = 1000
"""Images and chains of Figures 13 and 14, where there are as many images."""
LARGER = 4.0
"""Of Figure 14: the factor on the SGLD step size α."""
BINS, MOST_TICKS = 50, 6
WIDE = 30.0
"""How many standard deviations of the data the bins may span and be of one width."""


def courses(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Trainings by their rows; the end of each is its last tenth."""
    if config.count is not None:
        raise ConfigError("Figure 12 draws no images and no chains; leave --count out")
    frame = frame_of([_course(label, run) for label, run in shortrun.ordered(runs)])
    at_zero = frame["beta_star"] == 0
    varies = (frame["high"] - frame["low"])[at_zero].astype(float).median(skipna=False)
    # Not a ratio: the gap at β* = 0 changes its sign from update to update.
    wider = frame["gap"].astype(float) - shortrun.by_beta(frame, "gap").get(0.0, math.nan)
    known = ~at_zero & (at_zero.any() and not varies <= 0)
    frame["widening"] = (wider / varies).astype(object).where(known, None)
    frame.attrs["data"] = runs[0].data.name
    return frame


def _course(label: str, run: TrainedRun) -> dict[str, Any]:
    beta_star = float(run.config.beta_star)
    weights = [tags.weight_tag(name, beta_star) for name in (tags.GRAD_SCALE, tags.ESS)]
    steps, values = series(run.path, ["f_pos/mean", "f_neg/mean", *weights])
    if not len(steps):
        raise ConfigError(
            f"{run.path / METRICS} has no rows, of which Figure 12 is drawn; wait for the run, or "
            "go on with it by --resume"
        )
    f_pos, f_neg, grad_scale, ess = values.values()
    last = slice(-max(1, len(steps) // 10), None)
    low, gap, high = quartiles((f_pos - f_neg)[last])
    return {
        **shortrun.named(run, label),
        "beta": beta_star / run.settings.output_scale,
        "updates": len(steps),
        "gap": gap,
        "low": low,
        "high": high,
        "grad_scale": quartiles(grad_scale[last])[1],
        "ess": quartiles(ess[last])[1],
        "not_finite": int((~np.isfinite(f_pos - f_neg)).sum()),
        "steps": steps,
        "f_pos": f_pos,
        "f_neg": f_neg,
    }


def quartiles(values: Floats) -> Floats:
    """Lower quartile, median and upper quartile; NaN where a value is not finite."""
    known = np.isfinite(values).all()
    return np.quantile(values, (0.25, 0.5, 0.75)) if known else np.full(3, math.nan)


def windows(steps: Floats, gaps: Floats) -> tuple[Floats, Floats]:
    """The gap over time: (W,) mean steps of consecutive windows, and (3, W) the quartiles there."""
    size = max(1, len(steps) // WINDOWS)
    parts = [slice(start, start + size) for start in range(0, len(steps), size)]
    middles = np.array([steps[part].mean() for part in parts])
    return middles, np.array([quartiles(gaps[part]) for part in parts]).T


def linear_up_to(near: float, far: float, times: float) -> float | None:
    """Up to where an axis is linear, a power of ten; None: all of it, far is not far from near."""
    return 10.0 ** math.floor(math.log10(near)) if near > 0 and far > times * near else None


def of_curves(values: Sequence[Floats]) -> float | None:
    """:func:`linear_up_to` of the narrowest and the widest of some curves."""
    known = [np.abs(own[np.isfinite(own)]) for own in values]
    spreads = [size for own in known if len(own) and (size := float(np.quantile(own, 0.9))) > 0]
    return linear_up_to(min(spreads), max(spreads), SPREAD) if spreads else None


def draw_courses(frame: pd.DataFrame, title: str) -> Figure:
    """A panel for each run, on common axes, and one for the gaps of all."""
    rows = frame.to_dict("records")
    every = max(1, min(PAPERS_EVERY, max(len(row["steps"]) for row in rows) // LEAST_POINTS))
    words = f"means over one batch, every {every} updates" if every > 1 else "means over a batch"
    # Room for the gaps of a few runs beside their legend, below the panels.
    size, sides = (2.9, 2.1), (0.85, 0.35, 0.25)
    room: dict[str, Any] = {"top": 1.15, "below": 0.75, "foot": 3.9, "least": 7.25}
    canvas, panels = grid(title, words, len(rows), 4, size, sides=sides, **room)
    first, right = panels[0], 1 + max(int(row["steps"][-1]) for row in rows)
    linear = of_curves([np.concatenate([row["f_pos"], row["f_neg"]]) for row in rows])
    labels = {"f_pos": "f(x⁺), data", "f_neg": "f(x⁻), negatives"}
    for axes, row in zip(panels, rows, strict=True):
        shown = row["steps"] % every == 0
        for (name, label), colour in zip(labels.items(), COLOURS, strict=False):
            axes.plot(row["steps"][shown], row[name][shown], color=colour, lw=0.9, label=label)
        if axes is not first:
            axes.sharey(first)
        _finish(axes, linear, row["run"], "f", right)
        if axes.get_position().x0 > first.get_position().x0:
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")
    legend_above(canvas, 0.76, first.lines)
    axes = canvas.axes(0.85, canvas.height - 3.75, canvas.width - 0.85 - 0.25 - 1.6, 3.0)
    gaps = [row["f_pos"] - row["f_neg"] for row in rows]
    # The order of β* is that of the lightness; the lightest yellow is left out.
    shades = frame["beta_star"].rank(method="dense").sub(1)
    shades *= 0.88 / max(1, shades.max())
    for row, gap, place in zip(rows, gaps, shades, strict=True):
        shade = colormaps["viridis"](place)
        steps, (low, middle, high) = windows(row["steps"], gap)
        axes.fill_between(steps, low, high, color=shade, alpha=0.2, lw=0)
        axes.plot(steps, middle, color=shade, lw=1.5, label=row["run"])
    axes.axhline(0, color="black", lw=0.6)
    heading = "the gap: median and quartiles of consecutive updates"
    _finish(axes, linear := of_curves(gaps), heading, "mean f(x⁺) − mean f(x⁻)", right)
    if linear is not None:
        # Where all gaps are positive, the axis would end a decade below 0.
        axes.set_ylim(bottom=min(axes.dataLim.ymin, 0.0) - linear / 2)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return canvas.figure


def _finish(axes: Axes, linear: float | None, title: str, ylabel: str, right: int) -> None:
    if linear is not None:
        axes.set_yscale("symlog", linthresh=linear)
        ylabel += f"\nsymlog, linear up to ±{linear:g}"
    plain(axes, title, "update", ylabel)
    axes.set_xlim(0, right)


def energies(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """f on training images with the training's noise and on fresh negatives: Figures 13 and 14.

    At every step size chains have the same starts and noise.
    """
    of_beta = shortrun.ordered(runs)
    shortrun.check_runs(runs, config.name)
    frame = frame_of([row for label, run in of_beta for row in _energies(label, run, config)])
    if config.name == "14":
        usual = frame.groupby("path")["mean"].transform("first")
        rise = (frame["mean"] - usual).astype(float) / frame["data_std"].astype(float)
        frame["rise"] = rise.astype(object).where(frame["step_size"] != 1, None)
    frame.attrs["data"] = runs[0].data.name
    return frame


def _energies(label: str, run: TrainedRun, config: ShortRunFigure) -> Iterator[dict[str, Any]]:
    generator = torch.Generator(run.device).manual_seed(config.seed)
    clean = shortrun.some_of(run, run.data.train_x, generator, config.count or COUNT)
    data = shortrun.noisy(run, clean, generator)
    starts = run.starts(len(clean), generator)
    state = generator.get_state()
    f_pos, f_clean = (run.energies(x).double().cpu().numpy() for x in (data, clean))
    own = {**shortrun.named(run, label), "images": len(data), "clean_mean": finite(f_clean).mean()}
    own["halves"] = overlap(finite(f_pos[::2]), finite(f_pos[1::2]))
    for factor in (1.0, LARGER) if config.name == "14" else (1.0,):
        generator.set_state(state)
        (x,) = shortrun.followed(run, starts, (run.settings.sgld_steps,), generator, factor)
        f_neg = run.energies(x).double().cpu().numpy()
        own |= {"step_size": factor, **separation(f_pos, f_neg)}
        yield own | {"f_pos": f_pos, "f_neg": f_neg}


def finite(values: Floats) -> pd.Series:
    """Those that are; of none mean and deviation are NaN."""
    return pd.Series(values[np.isfinite(values)], dtype=float)


def separation(data: Floats, negatives: Floats) -> dict[str, float]:
    """f on data, (N,), beside f on negatives, (M,): of the finite values, NaN where none are."""
    f_pos, f_neg = finite(data), finite(negatives)
    return {
        "data_mean": f_pos.mean(),
        "data_std": f_pos.std(ddof=0),
        "mean": f_neg.mean(),
        "std": f_neg.std(ddof=0),
        "gap": f_pos.mean() - f_neg.mean(),
        "above": auroc(*(torch.tensor(own.to_numpy()) for own in (f_neg, f_pos))),
        "overlap": overlap(f_pos, f_neg),
        "not_finite": len(negatives) - len(f_neg),
    }


def overlap(data: pd.Series, negatives: pd.Series) -> float:
    """Sum over bins of the smaller share; NaN where there is no value on one side."""
    if not len(data) or not len(negatives):
        return math.nan
    bins, _ = edges(data, negatives)
    return float(np.minimum(shares(data, bins), shares(negatives, bins)).sum())


def shares(values: pd.Series, bins: Floats) -> Floats:
    """What share of all values falls into each bin, (B,); all are of finite values."""
    return np.histogram(values, bins)[0] / max(1, len(values))


def edges(*samples: pd.Series) -> tuple[Floats, float | None]:
    """Edges of common bins, (BINS + 1,), and up to where their axis is linear; None: all of it.

    They are of one width on the axis asinh((f − mean of the data) / where it is linear), which is
    one to ten standard deviations. The samples are finite values, those of the data first, of which
    there is at least one.
    """
    found: Floats = np.histogram_bin_edges(np.concatenate(samples), BINS)
    centre, spread = samples[0].mean(), 10 * samples[0].std(ddof=0)
    linear = linear_up_to(spread, found[-1] - found[0], WIDE / 10)
    if linear is not None:
        # Rounding must not leave the extremes outside.
        first, last = np.arcsinh((found[[0, -1]] - centre) / linear)
        found[1:-1] = centre + linear * np.sinh(np.linspace(first, last, BINS + 1)[1:-1])
    return found, linear


def draw_energies(frame: pd.DataFrame, title: str) -> Figure:
    """A panel for each run, each on its own axes: f less its mean on data."""
    groups = [own.to_dict("records") for own in shortrun.by_run(frame)]
    words = "f is known up to a constant: 0 is its mean on data"
    size, sides = (3.3, 2.2), (0.75, 0.65, 0.25)
    room: dict[str, Any] = {"top": 1.25, "below": 1.0, "least": 6.4}
    canvas, panels = grid(title, words, len(groups), 3, size, sides=sides, **room)
    factors = [row["step_size"] for row in groups[0]]
    styles: list[dict[str, Any]] = [{"fill": True, "color": COLOURS[0], "alpha": 0.55}]
    # The training's own negatives, for comparison, do not hide the others.
    styles += [{"fill": False, "color": DARK, "lw": 1.1, "ls": "--"}] * (len(factors) - 1)
    styles.append({"fill": True, "color": COLOURS[1], "alpha": 0.55})
    first = panels[0].get_position().x0
    for axes, rows in zip(panels, groups, strict=True):
        xlabel = _draw_histograms(axes, rows, styles)
        ylabel = "share of images (%)" if axes.get_position().x0 == first else ""
        plain(axes, rows[0]["run"], xlabel, ylabel)
    each = [f", step size × {factor:g}" if len(factors) > 1 else "" for factor in factors]
    labels = zip(["data", *(f"negatives{more}" for more in each)], styles, strict=True)
    legend_above(canvas, 0.8, [Patch(label=label, **style) for label, style in labels])
    return canvas.figure


def _draw_histograms(axes: Axes, rows: list[dict[str, Any]], styles: list[dict[str, Any]]) -> str:
    """What stands below them."""
    own, last, label = rows[0], rows[-1], "f − mean f(x⁺)"
    samples = [finite(x) - own["data_mean"] for x in (own["f_pos"], *(r["f_neg"] for r in rows))]
    if not len(samples[0]):
        axes.text(0.5, 0.5, "f is finite nowhere on data", transform=axes.transAxes, ha="center")
        return ""
    bins, linear = edges(*samples)
    for style, sample in zip(styles, samples, strict=True):
        axes.stairs(100 * shares(sample, bins), bins, **style)
    axes.set_ylim(bottom=0)
    if linear is None:
        axes.locator_params(axis="x", nbins=5)
    else:
        axes.set_xscale("symlog", linthresh=linear)
        axes.set_xticks(symlog_ticks(bins[0], bins[-1], linear))
        axes.set_xticks([], minor=True)
        label += f", symlog, linear up to ±{linear:g}"
    usual = f" (× 1: {number(own['above'])})" if len(rows) > 1 else ""
    words = f"P(f⁻ > f⁺) = {number(last['above'])}{usual}"
    if last["not_finite"]:
        words += f"; {last['not_finite']:,} of {own['images']:,} not finite"
    return f"{label}\n{words}"


def symlog_ticks(low: float, high: float, linear: float) -> list[float]:
    """0 and powers of ten from `linear` on, few enough that their labels have room."""
    first = round(math.log10(linear))
    lasts = [math.floor(math.log10(max(end, linear / 2))) for end in (-low, high)]
    stride = max(1, -(-sum(last - first + 1 for last in lasts) // MOST_TICKS))
    # From the ends inwards: none is nearer to 0 than to its neighbour.
    below, above = (10.0 ** np.arange(last, first + stride - 2, -stride) for last in lasts)
    return sorted([*-below, 0.0, *above])


_COLUMNS = (
    "Of as many training images, with the training's noise, as chains: data_mean, data_std, mean "
    "and std of f(x⁺) and f(x⁻); clean_mean of the images without noise; above, P(f⁻ > f⁺) of all "
    "pairs, 0.5 where they cannot be told apart; overlap of the histograms, 1 where they are the "
    "same, and less of few values: halves is that of two halves of f(x⁺). Chains whose f is not "
    "finite are counted, and left out of all else."
)
STUDIES = {
    "12": Study(
        "Figure 12: f during training",
        "robust objective, Appendix L, Figure 12",
        shortrun.opened,
        courses,
        draw_courses,
        "gap: mean f(x⁺) − mean f(x⁻) of a batch. It, its quartiles low and high, grad_scale and "
        "ess are medians of the last tenth of the updates; at β* = 0 the last two are those of the "
        "guard's reference. widening: by how much the gap is wider than at β* = 0, in "
        "interquartile ranges of the gap there.",
        "the gap between f(x⁺) and f(x⁻) widens with every step up of β*",
        lambda frame: ascending(shortrun.by_beta(frame, "gap").tolist()),
    ),
    "13": Study(
        "Figure 13: f on data and on negatives of SGLD",
        "robust objective, Appendix L, Figure 13",
        shortrun.opened,
        energies,
        draw_energies,
        _COLUMNS,
        "negatives and data differ in f, the more the larger β* is",
        lambda frame: ascending((-shortrun.by_beta(frame, "overlap")).tolist()),
    ),
    "14": Study(
        "Figure 14: f on data and on negatives of SGLD, step size × 4",
        "robust objective, Appendix L, Figure 14",
        shortrun.opened,
        energies,
        draw_energies,
        f"{_COLUMNS} rise: of the mean f(x⁻), in standard deviations of f(x⁺).",
        "with 4 times the step size negatives reach higher f in every run",
        lambda frame: ascending([0.0, frame["rise"].dropna().min()]),
    ),
}
