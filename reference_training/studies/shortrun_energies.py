"""f on data and on negatives, during training and after it: Figures 12 to 14 of Appendix L."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
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
from ..plots.canvas import COLOURS, DARK, plain, tiling
from ..plots.numbers import number
from ..shortrun.trained import TrainedRun
from . import shortrun
from .config import ShortRunFigure
from .study import Study, ascending

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
BINS = 50
WIDE = 30.0
"""How many standard deviations of the data the bins may span and be of one width."""


def courses(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Trainings by their rows; the end of each is its last tenth."""
    if config.count is not None:
        raise ConfigError("Figure 12 draws no images and no chains; leave --count out")
    frame = shortrun.each(runs, config, _course, 0, persistent=True, by_beta_star=True)
    at_zero = frame["beta_star"] == 0
    varies = (frame["high"] - frame["low"])[at_zero].astype(float).median(skipna=False)
    # Not a ratio: the gap at β* = 0 changes its sign from update to update.
    wider = frame["gap"].astype(float) - shortrun.by_beta(frame, "gap").get(0.0, math.nan)
    known = ~at_zero & (at_zero.any() and not varies <= 0)
    frame["widening"] = (wider / varies).astype(object).where(known, None)
    return frame


def _course(run: TrainedRun, *_: Any) -> Iterator[dict[str, Any]]:
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
    yield {
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
    words = f"above means over one batch{f', every {every} updates' if every > 1 else ''}; below "
    words += "medians and quartiles of consecutive updates"
    lines, columns = tiling(len(rows), 4)
    figure, (top, bottom) = shortrun.picture(
        title, words, (0.4 + 2.7 * lines, 3.5), width=max(7.25, 0.8 + 3.2 * columns)
    )
    right = 1 + max(int(row["steps"][-1]) for row in rows)
    linear = of_curves([np.concatenate([row["f_pos"], row["f_neg"]]) for row in rows])
    labels = {"f_pos": "f(x⁺), data", "f_neg": "f(x⁻), negatives"}
    panels = shortrun.tiles(top, len(rows), 4, sharey=True)
    for i, (axes, row) in enumerate(zip(panels, rows, strict=True)):
        shown = row["steps"] % every == 0
        for (name, label), colour in zip(labels.items(), COLOURS, strict=False):
            axes.plot(row["steps"][shown], row[name][shown], color=colour, lw=0.9, label=label)
        _finish(axes, linear, row["run"], "" if i % columns else "f", right)
    top.legend(handles=panels[0].lines, loc="outside upper center", ncols=2, frameon=False)
    axes = bottom.subplots()
    gaps = [row["f_pos"] - row["f_neg"] for row in rows]
    # The order of β* is that of the lightness; the lightest yellow is left out.
    shades = frame["beta_star"].rank(method="dense").sub(1)
    shades *= 0.88 / max(1, shades.max())
    for row, gap, place in zip(rows, gaps, shades, strict=True):
        size = max(1, len(gap) // WINDOWS)
        steps, own = (
            pd.Series(of).groupby(np.arange(len(gap)) // size) for of in (row["steps"], gap)
        )
        low, middle, high = np.stack(own.agg(quartiles)).T
        axes.fill_between(
            steps.mean(), low, high, color=(shade := colormaps["viridis"](place)), alpha=0.2, lw=0
        )
        axes.plot(steps.mean(), middle, color=shade, lw=1.5, label=row["run"])
    axes.axhline(0, color="black", lw=0.6)
    _finish(axes, linear := of_curves(gaps), "the gap", "mean f(x⁺) − mean f(x⁻)", right)
    if linear is not None:
        # Where all gaps are positive, the axis would end a decade below 0.
        axes.set_ylim(bottom=min(axes.dataLim.ymin, 0.0) - linear / 2)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def _finish(axes: Axes, linear: float | None, title: str, ylabel: str, right: int) -> None:
    if linear is not None:
        axes.set_yscale("symlog", linthresh=linear)
        ylabel += f"\nsymlog, linear up to ±{linear:g}" if ylabel else ""
    plain(axes, title, "update", ylabel)
    axes.set_xlim(0, right)


def energies(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """f on training images with the training's noise and on fresh negatives: Figures 13 and 14.

    At every step size chains have the same starts and noise.
    """
    factors = (1.0, LARGER) if config.name == "14" else (1.0,)
    rows = partial(_energies, factors=factors)
    frame = shortrun.each(runs, config, rows, COUNT, by_beta_star=True)
    if config.name == "14":
        usual = frame.groupby("path")["mean"].transform("first")
        rise = (frame["mean"] - usual).astype(float) / frame["data_std"].astype(float)
        frame["rise"] = rise.astype(object).where(frame["step_size"] != 1, None)
    return frame


def _energies(
    run: TrainedRun, count: int, generator: torch.Generator, factors: Sequence[float]
) -> Iterator[dict[str, Any]]:
    clean = shortrun.some_of(run, run.data.train_x, generator, count)
    data = shortrun.noisy(run, clean, generator)
    starts = run.starts(len(clean), generator)
    state = generator.get_state()
    f_pos = run.energies(data).double().cpu().numpy()
    for factor in factors:
        generator.set_state(state)
        (x,) = shortrun.followed(run, starts, (run.settings.sgld_steps,), generator, factor)
        f_neg = run.energies(x).double().cpu().numpy()
        own = {"images": len(data), "step_size": factor, **separation(f_pos, f_neg)}
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
        "not_finite": len(negatives) - len(f_neg),
    }


def differ(frame: pd.DataFrame) -> bool | None:
    """Whether P(f⁻ > f⁺) is the further from a half the larger β* is."""
    off = (frame["above"].astype(float) - 0.5).abs()
    return ascending(shortrun.by_beta(frame.assign(off=off), "off").tolist())


def draw_energies(frame: pd.DataFrame, title: str) -> Figure:
    """A panel for each run, each on its own axes: f less its mean on data."""
    groups = [own.to_dict("records") for own in shortrun.by_run(frame)]
    lines, columns = tiling(len(groups), 3)
    figure, (band,) = shortrun.picture(
        title,
        "f is known up to a constant: 0 is its mean on data",
        (0.4 + 3.1 * lines,),
        width=max(6.4, 0.6 + 3.8 * columns),
    )
    factors = [row["step_size"] for row in groups[0]]
    styles: list[dict[str, Any]] = [{"fill": True, "color": COLOURS[0], "alpha": 0.55}]
    # The training's own negatives, for comparison, do not hide the others.
    styles += [{"fill": False, "color": DARK, "lw": 1.1, "ls": "--"}] * (len(factors) - 1)
    styles.append({"fill": True, "color": COLOURS[1], "alpha": 0.55})
    panels = shortrun.tiles(band, len(groups), 3)
    for i, (axes, rows) in enumerate(zip(panels, groups, strict=True)):
        xlabel = _draw_histograms(axes, rows, styles)
        plain(axes, rows[0]["run"], xlabel, "" if i % columns else "share of images (%)")
    each = [f", step size × {factor:g}" if len(factors) > 1 else "" for factor in factors]
    labels = zip(["data", *(f"negatives{more}" for more in each)], styles, strict=True)
    handles = [Patch(label=label, **style) for label, style in labels]
    band.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _draw_histograms(axes: Axes, rows: list[dict[str, Any]], styles: list[dict[str, Any]]) -> str:
    """What stands below them."""
    own, last, label = rows[0], rows[-1], "f − mean f(x⁺)"
    samples = [finite(x) - own["data_mean"] for x in (own["f_pos"], *(r["f_neg"] for r in rows))]
    if not len(samples[0]):
        axes.text(0.5, 0.5, "f is finite nowhere on data", transform=axes.transAxes, ha="center")
        return ""
    bins = np.histogram_bin_edges(np.concatenate(samples), BINS)
    linear = linear_up_to(10 * own["data_std"], np.ptp(bins), WIDE / 10)
    if linear is not None:
        # Of one width on the scale of the axis; rounding must not leave the extremes outside.
        ends = np.arcsinh(bins[[0, -1]] / linear)
        bins[1:-1] = linear * np.sinh(np.linspace(ends[0], ends[1], BINS + 1)[1:-1])
        axes.set_xscale("asinh", linear_width=linear)
        # Powers of ten, the fewer the more decades there are.
        decades = int(math.log10(np.abs(bins).max() / linear))
        powers = linear * 10.0 ** np.arange(decades // 4, decades + 1, 1 + decades // 4)
        ticks = [t for t in (*-powers, 0.0, *powers) if bins[0] <= t <= bins[-1]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        label += f", on a scale of asinh(x / {linear:g})"
    for style, sample in zip(styles, samples, strict=True):
        shares = 100 * np.histogram(sample, bins)[0] / max(1, len(sample))
        axes.stairs(shares, bins, **style)
    axes.set_ylim(bottom=0)
    usual = f" (× 1: {number(own['above'])})" if len(rows) > 1 else ""
    words = f"P(f⁻ > f⁺) = {number(last['above'])}{usual}"
    if last["not_finite"]:
        words += f"; {last['not_finite']:,} of {own['images']:,} not finite"
    return f"{label}\n{words}"


_COLUMNS = (
    "Of as many training images, with the training's noise, as chains: data_mean, data_std, mean "
    "and std of f(x⁺) and f(x⁻); above, P(f⁻ > f⁺) of all pairs, 0.5 where they cannot be told "
    "apart. Chains whose f is not finite are counted, and left out of all else."
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
        differ,
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
