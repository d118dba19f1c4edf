"""Figures "steps" and "long-run": chains for shorter, longer and far longer than in training.

Question 3 of the author response of Nijkamp et al. (2019); and Nijkamp et al. (2020, AAAI), "On the
Anatomy of MCMC-Based Maximum Likelihood Learning of Energy-Based Models", section 3.3 and Figure 1:
what was learned convergently keeps its chains like data, and a short-run model over-saturates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from torch import Tensor

from ..plots.canvas import COLOURS, DARK
from ..shortrun.trained import TrainedRun
from . import shortrun
from .config import ShortRunFigure
from .measures import means, measure
from .study import ABOUT, Study, frame_of

SHOWN = 3
"""Chains whose images are kept."""
STYLES: list[dict[str, Any]] = [{"color": c, "marker": m} for m in ".x+" for c in COLOURS]
"""Of the lines of runs."""
TIMES = 100
"""The last look at long chains, in multiples of K."""
MANY = 0.25
"""Share of the chains that is many beyond a quantile which 2.5% of the data are beyond."""
TALLEST = 100.0
"""Up to here scales are linear; and beyond it, and beyond the size at the start, they are cut."""
DASHES = {"chains": "-", "from noise": "-", "from data": "--"}
"""Of the lines of kinds of chains."""


def steps(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Chains from noise, as in training, looked at before, at and after training's K steps.

    One chain gives all stops. Runs with images of one shape have the same starts and noise.
    """
    trained = [run.settings.sgld_steps for run in runs]
    even = [round(i * max(trained) / 5) for i in range(11)]
    stops = sorted({*even, *trained, *(2 * k for k in trained)})

    def rows(run: TrainedRun, count: int, generator: torch.Generator) -> list[dict[str, Any]]:
        chains = shortrun.followed(run, run.starts(count, generator), stops, generator)
        generator.manual_seed(config.seed)
        data = shortrun.some_of(run, run.data.train_x, generator)
        data = shortrun.noisy(run, data, generator)
        held_out = shortrun.some_of(run, run.data.test_x, generator)
        return _measured(run, stops, {"chains": chains}, data, held_out)

    return shortrun.each(runs, config, rows, 128, most=len(STYLES))


def long_chains(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Chains of every run from noise and from held-out data, for 100 times the largest K."""
    last = TIMES * max(run.settings.sgld_steps for run in runs)

    def rows(run: TrainedRun, count: int, generator: torch.Generator) -> list[dict[str, Any]]:
        stops, noisy = stops_of(run.settings.sgld_steps, last), partial(shortrun.noisy, run)
        noise = run.starts(count, generator)
        test = shortrun.some_of(run, run.data.test_x, generator)
        starts = noisy(shortrun.some_of(run, run.data.test_x, generator, count), generator)
        data = noisy(shortrun.some_of(run, run.data.train_x, generator), generator)
        states = shortrun.followed(run, torch.cat([noise, starts]), stops, generator)
        parts = {"from noise": slice(count), "from data": slice(count, None)}
        chains = {kind: [x[part] for x in states] for kind, part in parts.items()}
        return _measured(run, stops, chains, data, noisy(test, generator))

    most = len(COLOURS)
    return shortrun.each(runs, config, rows, 64, most=most, held_out=True, persistent=True)


def stops_of(trained: int, last: int) -> list[int]:
    """Where chains are looked at: 0, K, 2 K, 5 K, 10 K, 20 K, ... and `last`."""
    stops = {n * 10**k * trained for k in range(len(str(last))) for n in (1, 2, 5)}
    return sorted({0, last, *(stop for stop in stops if stop < last)})


def _measured(
    run: TrainedRun,
    stops: Sequence[int],
    chains: Mapping[str, Sequence[Tensor]],
    data: Tensor,
    held_out: Tensor,
) -> list[dict[str, Any]]:
    """Chains of each kind at each stop in numbers, and what they are held against."""
    settings, of_data, rows = run.settings, measure(run, data), []
    noise = settings.noise_std * math.sqrt(math.prod(run.data.sample_shape))
    low, high = (of_data[["contrast", "f"]].quantile(q) for q in (0.025, 0.975))
    looks: list[tuple[str, int | None, Tensor]] = [
        (kind, stop, x)
        for kind, states in chains.items()
        for stop, x in zip(stops, states, strict=True)
    ]
    for kind, stop, x in [*looks, ("data", None, data), ("held-out", None, held_out)]:
        found = measure(run, x)
        kept = found[np.isfinite(found["contrast"])]
        row: dict[str, Any] = {
            "K": settings.sgld_steps,
            "most_K": settings.most_sgld_steps,
            "images": kind,
        }
        row |= {"steps": stop, "finite": len(kept), "count": len(x), **means(kept)}
        row["variety"] = spread(x) / spread(data)
        row["pull"] = row["slope"] * settings.step_size * abs(run.drift) / noise
        for name in ("contrast", "f"):
            row[f"{name}_above"] = (kept[name] > high[name]).mean()
            row[f"{name}_below"] = (kept[name] < low[name]).mean()
        rows.append(row | {"shown": None if stop is None else x[:SHOWN].cpu()})
    frame, (*_, by_data, by_held_out) = frame_of(rows), rows
    frame["contrast_of_data"] = frame["contrast"].astype(float) / by_data["contrast"]
    frame["distance_of_held_out"] = frame["distance"].astype(float) / by_held_out["distance"]
    frame["gap"] = by_data["f"] - frame["f"].astype(float)
    frame["f_off"] = -frame["gap"] / of_data["f"].std(ddof=0)
    return [*frame.to_dict("records")]


def over_saturated(frame: pd.DataFrame) -> bool | None:
    """Whether contrast grows from K to 2 K steps, and beyond that of data, in every run."""
    said = []
    for rows in shortrun.by_run(frame[frame["images"] == "chains"]):
        ratio, first = rows.set_index("steps")["contrast_of_data"], rows["K"].iloc[0]
        early, late = ratio[first], ratio[2 * first]
        said.append(None if math.isnan(early - late) else late > max(early, 1.0))
    return None if None in said else all(said)


def spread(images: Tensor) -> float:
    """How unlike images are: the root of the variance over images, on the mean of their entries.

    Args:
        images: (N, ...); those that are not finite are left out. NaN where fewer than two are left.
    """
    rows = pd.DataFrame(images.detach().cpu().double().flatten(1).numpy())
    return float(rows[np.isfinite(rows).all(axis=1)].var().mean() ** 0.5)


def stays(frame: pd.DataFrame) -> bool:
    """Whether at the last stop the chains from data are like data, in contrast and in f.

    They are where all are finite, and fewer than a quarter is beyond a quantile of 2.5% of data.
    """
    last = frame[(frame["images"] == "from data") & (frame["steps"] == frame["steps"].max())]
    beyond = last[["contrast_above", "contrast_below", "f_above", "f_below"]].astype(float)
    return bool((last["finite"] == last["count"]).all() and (beyond < MANY).all(axis=None))


def _curve(frame: pd.DataFrame, name: str, level: float | None, axes: Axes) -> None:
    """Lines of all runs, upright ones where their K is, level ones where the data are."""
    early, every = [TALLEST], [0.0]
    for own, style in zip(shortrun.by_run(frame), STYLES, strict=False):
        for images, dashes in DASHES.items():
            rows = own[own["images"] == images]
            values = rows[name].astype(float).replace([math.inf, -math.inf], math.nan)
            axes.plot(rows["steps"].tolist(), values, **style, ls=dashes, lw=1.4)
            every += values.abs().dropna().tolist()
            early += values.abs()[rows["steps"] == 0].dropna().tolist()
        low, high = own["K"].iloc[0], own["most_K"].iloc[0]
        axes.axvspan(low, high, color=style["color"], alpha=0.12 if low < high else 0.6, lw=0.8)
        if level is None:
            of_data = own[own["images"] == "data"][name].iloc[0]
            axes.axhline(of_data, color=style["color"], lw=1.2, ls=":")
    if max(every) > TALLEST:
        axes.set_yscale("symlog", linthresh=1)
        # What diverges leaves the panel, and the other curves stay readable.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2 * max(early)), min(high, 2 * max(early)))
    if level is not None:
        axes.axhline(level, color=DARK, lw=1.2, ls=":")


def _draw(
    frame: pd.DataFrame,
    title: str,
    words: str,
    curves: dict[str, tuple[str, float | None]],
    finish: Callable[[Axes], object],
) -> Figure:
    """For each run a strip of each kind of its chains, K framed, and curves of all runs below."""
    groups = [*zip(shortrun.by_run(frame), STYLES, strict=False)]
    shown = frame[frame["shown"].notna()]
    kinds = [kind for kind in DASHES if kind in set(shown["images"])]
    cell = min(0.95, 10.9 / shown.groupby("path").size().max())
    heights = [0.9 + SHOWN * cell] * len(groups) + [6.0 + 0.25 * len(groups)]
    figure, bands = shortrun.picture(
        title, "strips are cut to [-1, 1], K framed; " + words, heights
    )
    short = EngFormatter(sep="")
    for band, (own, style) in zip(bands, groups, strict=False):
        band.suptitle(own[ABOUT].iloc[0], fontsize=10, color=(colour := style["color"]))
        for axes, kind in zip(shortrun.tiles(band, len(kinds), 2), kinds, strict=True):
            rows = own[own["images"] == kind]
            heads = [
                short(k) + (f"\n{lost} lost" if lost else "")
                for k, lost in zip(rows["steps"], rows["count"] - rows["finite"], strict=True)
            ]
            images = torch.stack(rows["shown"].tolist(), dim=1)
            wide = shortrun.strip(axes, [("", chain) for chain in images], heads)
            axes.set_ylabel("" if len(kinds) == 1 else kind, fontsize=9)
            framed = [*np.flatnonzero(rows["steps"].between(rows["K"], rows["most_K"]))]
            for i in framed:
                axes.get_xticklabels()[i].set(color=colour, weight="bold")
            ends = framed[0] * wide - 0.5, (framed[-1] + 1) * wide - 0.5
            axes.axvspan(*ends, fill=False, edgecolor=colour, lw=2, clip_on=False)

    def panel(name: str, level: float | None, axes: Axes) -> None:
        _curve(frame, name, level, axes)
        finish(axes)

    shortrun.curves(
        bands[-1],
        "means over the finite chains; upright: K; dotted: data with the training's noise",
        {label: partial(panel, *of) for label, of in curves.items()},
        "steps",
        [Line2D([], [], lw=2, label=own[ABOUT].iloc[0], **style) for own, style in groups],
    )
    return figure


def draw_steps(frame: pd.DataFrame, title: str) -> Figure:
    """Chains from noise, and the steps even."""
    curves: dict[str, tuple[str, float | None]] = {
        "contrast, of the data's": ("contrast_of_data", 1),
        "share shown as black or white": ("ends", None),
        "mean excess beyond [-1, 1]": ("excess", None),
        "mean f(data) − mean f(x⁻)": ("gap", 0),
        "distance to data, of that of held-out": ("distance_of_held_out", 1),
        "mean length of ∇f": ("slope", None),
    }
    words = "runs with images of one shape have the same starts and noise"
    last = max(frame["steps"].dropna())
    return _draw(frame, title, words, curves, lambda axes: axes.set_xlim(0, last))


def draw_long(frame: pd.DataFrame, title: str) -> Figure:
    """Chains from noise and, beside them, from data; the steps on a logarithmic scale."""
    last, least = max(frame["steps"].dropna()), min(frame["K"])
    curves: dict[str, tuple[str, float | None]] = {
        "mean f, off the data's, in its std": ("f_off", 0),
        "contrast, of the data's": ("contrast_of_data", 1),
        "variety of chains, of the data's": ("variety", 1),
        "distance to data, of held-out's": ("distance_of_held_out", 1),
        "chains above 97.5% of the data in f": ("f_above", None),
        "drift of a step over its noise": ("pull", None),
    }

    def finish(axes: Axes) -> None:
        axes.set_xscale("symlog", linthresh=least, linscale=0.5)
        # A power of ten in the linear part would lie on the 0.
        powers = (10**k for k in range(len(str(last))))
        axes.set_xticks([0, *(power for power in powers if power >= least)])
        axes.set_xlim(0, last)

    words = "red where not finite; curves are solid from noise and dashed from held-out data"
    return _draw(frame, title, words, curves, finish)


MEASURES = (
    "Means over the chains that are finite. excess: mean of max(|x| - 1, 0). ends: share shown as "
    "pure black or white. contrast: standard deviation of an image's entries. slope: length of "
    "∇f(x). distance: root mean square difference to the nearest training image, after cutting to "
    "[-1, 1]. variety: root of the variance over chains, on the mean of all entries, over that of "
    "the data; below 1 many chains have become one image. gap: mean f(data) − mean f(x⁻); f_off: "
    "minus that, in standard deviations of f over the data. pull: length of a step's drift over "
    "that of its noise. above, below: share of the chains beyond the data's 97.5% and 2.5% "
    "quantiles. Data are training images with the training's noise."
)
STUDIES = {
    "steps": Study(
        "Sampling with K2 steps what was trained with K1",
        "Nijkamp et al. (2019), author response, question 3",
        shortrun.opened,
        steps,
        draw_steps,
        MEASURES,
        "over-saturation for K2 > K1: contrast grows from K1 to 2 K1, and beyond the data's",
        over_saturated,
    ),
    "long-run": Study(
        "Chains that go on for long after K steps",
        "Nijkamp et al. (2020), section 3.3 and Figure 1",
        shortrun.opened,
        long_chains,
        draw_long,
        MEASURES,
        "after 100 K steps the chains from data are still like the data",
        stays,
    ),
}
