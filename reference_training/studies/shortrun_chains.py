"""Figures "steps" and "long-run": chains for shorter, longer and far longer than in training.

Question 3 of the author response of Nijkamp et al. (2019); and Nijkamp et al. (2020, AAAI), "On the
Anatomy of MCMC-Based Maximum Likelihood Learning of Energy-Based Models", section 3.3 and Figure 1:
what was learned convergently keeps its chains like data, and a short-run model over-saturates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from torch import Tensor

from ..plots.canvas import COLOURS, DARK
from ..plots.page import SIDE, WIDTH, Panels, page, show_chains
from ..shortrun.trained import TrainedRun
from . import shortrun
from .config import ShortRunFigure
from .measures import means, measure
from .study import ABOUT, Study, frame_of

SHOWN = 3
"""Chains whose images are kept."""
STYLES: list[dict[str, Any]] = [{"color": c, "marker": m} for m in ".x+" for c in COLOURS]
"""Of the lines of runs."""
BETWEEN = 0.35
"""Strips of one run, in inches."""
TIMES = 100
"""The last look at long chains, in multiples of K."""
MANY = 0.25
"""Share of the chains that is many beyond a quantile which 2.5% of the data are beyond."""
TALLEST = 100.0
"""Up to here scales are linear; and beyond it, and beyond the size at the start, they are cut."""
DASHES = {"chains": "-", "from noise": "-", "from data": "--"}
"""Of the lines of kinds of chains."""

Groups = Sequence[tuple[pd.DataFrame, dict[str, Any]]]
"""The rows of each run, and the style of its lines."""


def steps(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Chains from noise, as in training, looked at before, at and after training's K steps.

    One chain gives all stops. Runs with images of one shape have the same starts and noise.
    """
    shortrun.check_runs(runs, "steps", most=len(STYLES))
    trained = [run.settings.sgld_steps for run in runs]
    # Eleven even numbers to twice the largest K, which are shown, and K and 2 K of each.
    shown = {*(round(i * max(trained) / 5) for i in range(11)), *trained}
    stops = sorted({*shown, *(2 * k for k in trained)})
    rows: list[dict[str, Any]] = []
    for run in runs:
        generator = torch.Generator(run.device).manual_seed(config.seed)
        x = run.starts(config.count or 128, generator)
        chains = {"chains": shortrun.followed(run, x, stops, generator)}
        generator.manual_seed(config.seed)
        clean = shortrun.some_of(run, run.data.train_x, generator)
        data = {"data": shortrun.noisy(run, clean, generator), "data without noise": clean}
        data["held-out"] = shortrun.some_of(run, run.data.test_x, generator)
        rows += _measured(run, stops, chains, data)
    frame = _compared(rows)
    frame["shown"] = frame["shown"].where(frame["steps"].isin(shown), None)
    # Of the verdict there is enough in the table.
    return frame.loc[:, ~frame.columns.str.endswith(("_above", "_below", "_low", "_high", "_std"))]


def long_chains(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Chains of every run from noise and from held-out data, for 100 times the largest K."""
    most, held_out = len(COLOURS), config.count or 0
    shortrun.check_runs(runs, "long-run", most=most, held_out=held_out, are_new=False)
    last = TIMES * max(run.settings.sgld_steps for run in runs)
    rows: list[dict[str, Any]] = []
    for run in runs:
        stops = stops_of(run.settings.sgld_steps, last)
        count = config.count or min(64, len(run.data.test_x))
        generator = torch.Generator(run.device).manual_seed(config.seed)
        some_of, noisy = partial(shortrun.some_of, run), partial(shortrun.noisy, run)
        noise = run.starts(count, generator)
        test = some_of(run.data.test_x, generator)
        starts = noisy(some_of(run.data.test_x, generator, count), generator)
        data = {"data": noisy(some_of(run.data.train_x, generator), generator)}
        states = shortrun.followed(run, torch.cat([noise, starts]), stops, generator)
        data["held-out"] = noisy(test, generator)
        parts = {"from noise": slice(count), "from data": slice(count, None)}
        chains = {kind: [x[part] for x in states] for kind, part in parts.items()}
        rows += _measured(run, stops, chains, data)
    return _compared(rows)


def stops_of(trained: int, last: int) -> list[int]:
    """Where chains are looked at: 0, K, 2 K, 5 K, 10 K, 20 K, ... and `last`."""
    stops = {n * 10**k * trained for k in range(len(str(last))) for n in (1, 2, 5)}
    return sorted({0, last, *(stop for stop in stops if stop < last)})


def _measured(
    run: TrainedRun,
    stops: Sequence[int],
    chains: Mapping[str, Sequence[Tensor]],
    references: Mapping[str, Tensor],
) -> Iterator[dict[str, Any]]:
    """Chains of each kind at each stop in numbers, and what they are held against."""
    settings, data = run.settings, measure(run, references["data"])
    own = {**shortrun.named(run), "K": settings.sgld_steps, "most_K": settings.most_sgld_steps}
    noise = settings.noise_std * math.sqrt(math.prod(run.data.sample_shape))
    low, high = (data[["contrast", "f"]].quantile(q) for q in (0.025, 0.975))
    looks: list[tuple[str, int | None, Tensor, Tensor]] = [
        (kind, stop, x, states[0])
        for kind, states in chains.items()
        for stop, x in zip(stops, states, strict=True)
    ]
    for kind, stop, x, start in looks + [(kind, None, x, x) for kind, x in references.items()]:
        # In float64, where squares of what is still finite are finite too.
        moved = (x.double() - start.double()).square().flatten(1).mean(dim=1).sqrt()
        found = measure(run, x).assign(moved=moved.cpu().numpy())
        kept = found[np.isfinite(found["contrast"])]
        row = {**own, "images": kind, "steps": stop, "finite": len(kept), "count": len(x)}
        row |= {"largest": x.abs().max().item(), **means(kept)}
        row["variety"] = spread(x) / spread(references["data"])
        row["pull"] = row["slope"] * settings.step_size * abs(run.drift) / noise
        for name in ("contrast", "f"):
            row[f"{name}_above"] = (kept[name] > high[name]).mean()
            row[f"{name}_below"] = (kept[name] < low[name]).mean()
            row |= {f"{name}_low": low[name], f"{name}_high": high[name]}
        row |= {"f_std": data["f"].std(ddof=0), "verdict": verdict(row)}
        yield row | {"shown": None if stop is None else x[:SHOWN].cpu()}


def _compared(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """What is measured, over or beside that of the references of the run."""
    frame = frame_of(rows)
    for name, kind in (("contrast", "data"), ("colour", "data"), ("distance", "held-out")):
        of = frame[frame["images"] == kind].set_index("path")[name]
        column = f"{name}_of_{kind.replace('-', '_')}"
        frame[column] = frame[name].astype(float) / frame["path"].map(of).astype(float)
    of = frame[frame["images"] == "data"].set_index("path")["f"]
    frame["gap"] = (frame["path"].map(of) - frame["f"]).astype(float)
    frame["f_off"] = -frame["gap"] / frame["f_std"].astype(float)
    return frame


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


def verdict(row: Mapping[str, Any]) -> str:
    """What became of chains, by shares beyond quantiles that 95% of data lie in.

    "diverged" where one is not finite. By a quarter of them or more, first by their contrast and
    then by f: "over-saturated" and "washed out", "on peaks above the data" and "below the data";
    else "like data".
    """
    if row["finite"] < row["count"]:
        return "diverged"
    for name, above, below in (
        ("contrast", "over-saturated", "washed out"),
        ("f", "on peaks above the data", "below the data"),
    ):
        up, down = row[f"{name}_above"], row[f"{name}_below"]
        if max(up, down) >= MANY:
            return above if up >= down else below
    return "like data"


def stays(frame: pd.DataFrame) -> bool:
    """Whether the chains that began at data are like data at the last stop."""
    last = frame[(frame["images"] == "from data") & (frame["steps"] == frame["steps"].max())]
    return bool((last["verdict"] == "like data").all())


def _curve(groups: Groups, name: str, level: float | None, axes: Axes) -> None:
    """Lines of all runs, upright ones where their K is, level ones where the data are."""
    early, every = [TALLEST], [0.0]
    for own, style in groups:
        for images, dashes in DASHES.items():
            rows = own[own["images"] == images]
            values = rows[name].astype(float).replace([math.inf, -math.inf], math.nan)
            axes.plot(rows["steps"].tolist(), values, **style, ls=dashes, lw=1.4)
            every += values.abs().dropna().tolist()
            early += values.abs()[rows["steps"] == 0].dropna().tolist()
        low, high = own["K"].iloc[0], own["most_K"].iloc[0]
        if low == high:
            axes.axvline(low, lw=0.8, alpha=0.6, color=style["color"])
        else:
            axes.axvspan(low, high, color=style["color"], alpha=0.12, lw=0)
        of_data = own[own["images"] == "data"][name].iloc[0]
        if level is None and of_data is not None:
            axes.axhline(of_data, color=style["color"], lw=1.2, ls=":")
    axes.yaxis.set_major_formatter("{x:.4g}")
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
    caption: str,
    curves: dict[str, tuple[str, float | None]],
    finish: Callable[[Axes], object],
) -> Figure:
    """For each run a strip of each kind of its chains, K framed, and curves of all runs below."""
    groups = [*zip(shortrun.by_run(frame), STYLES, strict=False)]
    shown = frame[frame["shown"].notna()]
    kinds = [kind for kind in DASHES if kind in set(shown["images"])]
    wide = (WIDTH - 2 * SIDE - (len(kinds) - 1) * BETWEEN) / len(kinds)
    cell = min(0.95, wide / shown.groupby(["path", "images"]).size().max())
    short = EngFormatter(sep="")

    def strips(own: pd.DataFrame, colour: str, header: float, canvas: Any, y: float) -> None:
        for i, kind in enumerate(kinds):
            rows, left = own[own["images"] == kind], SIDE + i * (wide + BETWEEN)
            of = own[ABOUT].iloc[0] if len(kinds) == 1 else f"{own['run'].iloc[0]}: {kind}"
            canvas.write(left, y + 0.12, of, fontsize=10, ha="left", color=colour)
            steps, lost = rows["steps"].tolist(), rows["count"] - rows["finite"]
            heads = [
                short(k) + (f"\n{some} lost" if some else "")
                for k, some in zip(steps, lost, strict=True)
            ]
            low, high = own["K"].iloc[0], own["most_K"].iloc[0]
            framed = [i for i, k in enumerate(steps) if low <= k <= high]
            stack = torch.stack(rows["shown"].tolist(), dim=1)
            show_chains(canvas, left, y + header, stack, heads, cell, framed=framed, colour=colour)

    blocks = []
    for own, style in groups:
        chains = shown[shown["path"] == own["path"].iloc[0]]
        header = 0.55 + 0.18 * bool((chains["finite"] < chains["count"]).any())
        height = header + cell * len(chains["shown"].iloc[0]) + 0.2
        blocks.append((height, partial(strips, chains, style["color"], header)))
    panels = Panels(
        f"means over {caption}; upright: K; level and dotted: data with the noise of training",
        {label: partial(_curve, groups, *of) for label, of in [*curves.items()][:6]},
        "steps",
        finish,
        [(own[ABOUT].iloc[0], style) for own, style in groups],
        columns=1,
    )
    words = f"each row is one chain on its way, cut to [-1, 1] for display; K framed; {words}"
    return page(title, words, blocks, panels)


def draw_steps(frame: pd.DataFrame, title: str) -> Figure:
    """Chains from noise, and the steps even."""
    curves: dict[str, tuple[str, float | None]] = {
        "contrast, of the data's": ("contrast_of_data", 1),
        "colour, of the data's": ("colour_of_data", 1),
        "share shown as black or white": ("ends", None),
        "mean excess beyond [-1, 1]": ("excess", None),
        "mean f(data) − mean f(x⁻)": ("gap", 0),
        "distance to data, of that of held-out": ("distance_of_held_out", 1),
        "mean length of ∇f": ("slope", None),
    }
    if not frame.loc[frame["images"] == "data", "colour"].any():
        del curves["colour, of the data's"]
    words = "runs with images of one shape have the same starts and noise"
    caption, last = f"{frame['count'].iloc[0]:,} chains", max(frame["steps"].dropna())
    return _draw(frame, title, words, caption, curves, lambda axes: axes.set_xlim(0, last))


def draw_long(frame: pd.DataFrame, title: str) -> Figure:
    """Chains from noise and, beside them, from data; the steps on a logarithmic scale."""
    last, least = max(frame["steps"].dropna()), min(frame["K"])
    curves: dict[str, tuple[str, float | None]] = {
        "mean f, off the data's, in its std": ("f_off", 0),
        "contrast, of the data's": ("contrast_of_data", 1),
        "variety of chains, of the data's": ("variety", 1),
        "distance to data, of held-out's": ("distance_of_held_out", 1),
        "rms distance to the chain's start": ("moved", None),
        "drift of a step over its noise": ("pull", None),
    }

    def finish(axes: Axes) -> None:
        axes.set_xscale("symlog", linthresh=least, linscale=0.5)
        # A power of ten in the linear part would lie on the 0.
        powers = (10**k for k in range(len(str(last))))
        axes.set_xticks([0, *(power for power in powers if power >= least)])
        axes.set_xlim(0, last)

    caption = "the chains that are still finite; solid: from noise; dashed: from held-out data"
    return _draw(frame, title, "red where it is not finite", caption, curves, finish)


MEASURES = (
    "Means over the chains that are finite. beyond: share of entries outside [-1, 1]; excess: by "
    "how much, on the mean of all entries. ends: share shown as pure black or white. size: mean "
    "|x|. contrast: standard deviation of an image's entries. slope: length of ∇f(x). distance: "
    "root mean square difference to the nearest training image, after cutting to [-1, 1]. variety: "
    "root of the variance over chains, on the mean of all entries, over that of the data; below 1 "
    "many chains have become one image. gap: mean f(data) − mean f(x⁻); f_off: minus that, in "
    "standard deviations of f over the data. pull: length of a step's drift over that of its "
    "noise. moved: distance to the chain's start. above, below: share of the chains beyond the "
    "data's 97.5% and 2.5% quantiles, low and high. Data are training images with the training's "
    "noise."
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
