"""Figure "long-run": chains that go on for a hundred times the steps of training.

A short-run model samples well after K steps and over-saturates beyond them; one that was learned
convergently keeps its chains like data: Nijkamp et al. (2020, AAAI), "On the Anatomy of MCMC-Based
Maximum Likelihood Learning of Energy-Based Models", section 3.3 and Figure 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..plots.canvas import COLOURS, DARK
from ..plots.page import SIDE, WIDTH, Block, Panels, page, show_chains
from ..shortrun.trained import TrainedRun
from .config import ShortRunFigure
from .measures import means, measure
from .shortrun import (
    MEASURES,
    TOGETHER,
    by_run,
    check_runs,
    followed,
    named,
    noisy,
    opened,
    over,
    some_of,
)
from .study import ABOUT, Study, frame_of

SHOWN = 3
"""Chains whose images are kept."""
TIMES = 100
"""The last look at long chains, in multiples of K."""
MANY = 0.25
"""Share of the chains that is many beyond a quantile which 2.5% of the data are beyond."""
TALLEST = 100.0
"""Up to here scales are linear; and beyond it, and beyond the size at the start, they are cut."""


def long_chains(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Chains of every run from noise and from held-out data, for 100 times the largest K."""
    most, held_out = len(COLOURS), config.count or 0
    check_runs(runs, "long-run", most=most, held_out=held_out, what="chains", are_new=False)
    last = TIMES * max(run.settings.sgld_steps for run in runs)
    return frame_of([row for run in runs for row in _long(run, last, config)])


def stops_of(trained: int, last: int) -> tuple[int, ...]:
    """Where chains are looked at: 0, K, 2 K, 5 K, 10 K, 20 K, ... and `last`."""
    stops, scale = {0, last}, 1
    while scale * trained < last:
        stops |= {n * scale * trained for n in (1, 2, 5) if n * scale * trained < last}
        scale *= 10
    return tuple(sorted(stops))


def _long(run: TrainedRun, last: int, config: ShortRunFigure) -> Iterator[dict[str, Any]]:
    count = config.count or min(64, len(run.data.test_x))
    stops = stops_of(run.settings.sgld_steps, last)
    generator = torch.Generator(run.device).manual_seed(config.seed)
    starts = [run.starts(count, generator)]
    test = some_of(run, run.data.test_x, generator)
    starts.append(noisy(run, some_of(run, run.data.test_x, generator, count), generator))
    train = noisy(run, some_of(run, run.data.train_x, generator), generator)
    states = list(followed(run, torch.cat(starts), stops, generator, TOGETHER))
    held_out, data = measure(run, noisy(run, test, generator)), measure(run, train)
    of_test, of_data = means(held_out), means(data)
    data_spread, f_std = spread(train), float(data["f"].std(ddof=0))
    low, high = (data[["contrast", "f"]].quantile(q) for q in (0.025, 0.975))
    settings = run.settings
    drift = settings.step_size * abs(run.drift)
    drift /= settings.noise_std * math.sqrt(math.prod(run.data.sample_shape))
    own = {**named(run), "K": settings.sgld_steps}
    for i, start in enumerate(("noise", "data")):
        begin = torch.split(states[0], count)[i]
        for stop, every in zip(stops, states, strict=True):
            x = torch.split(every, count)[i]
            # In float64, where squares of what is still finite are finite too.
            moved = (x.double() - begin.double()).square().flatten(1).mean(dim=1).sqrt()
            found = measure(run, x).assign(moved=moved.cpu().numpy())
            kept = found[np.isfinite(found["contrast"])]
            row = means(kept)
            row |= {
                "contrast_of_data": over(row, of_data, "contrast"),
                "distance_of_held_out": over(row, of_test, "distance"),
                "variety": spread(x) / data_spread,
                "f_off": (row["f"] - of_data["f"]) / f_std if f_std else math.nan,
                "pull": row["slope"] * drift,
            }
            for name in ("contrast", "f"):
                row[f"{name}_above"] = _share(kept[name] > high[name])
                row[f"{name}_below"] = _share(kept[name] < low[name])
            if stop == last:
                row["verdict"] = verdict(row) if len(kept) == count else "diverged"  # type: ignore[assignment]
            where = {"images": f"from {start}", "steps": stop, "finite": len(kept), "count": count}
            largest = x.abs().max().item()
            yield {**own, **where, "largest": largest, **row, "shown": x[:SHOWN].cpu()}
    ends = {
        f"{name}_{end}": q[name] for end, q in (("low", low), ("high", high)) for name in q.index
    }
    yield {**own, "images": "data", **of_data, "pull": of_data["slope"] * drift, **ends}
    yield {**own, "images": "held-out", **of_test, "pull": of_test["slope"] * drift}


def _share(of: pd.Series) -> float:
    return float(of.mean()) if len(of) else math.nan


def spread(images: Tensor) -> float:
    """How unlike images are: the root of the variance over images, on the mean of their entries.

    Args:
        images: (N, ...); those that are not finite are left out. NaN where fewer than two are left.
    """
    rows = images.detach().cpu().double().flatten(1)
    rows = rows[rows.isfinite().all(dim=1)]
    return rows.var(dim=0).mean().sqrt().item() if len(rows) > 1 else math.nan


def verdict(row: dict[str, float]) -> str:
    """What became of chains that are finite, by shares beyond quantiles that 95% of data lie in.

    By a quarter of them or more, first by their contrast and then by f: "over-saturated" and
    "washed out", "on peaks above the data" and "below the data"; else "like data".
    """
    for name, above, below in (
        ("contrast", "over-saturated", "washed out"),
        ("f", "on peaks above the data", "below the data"),
    ):
        up, down = row[f"{name}_above"], row[f"{name}_below"]
        if max(up, down) >= MANY:
            return above if up >= down else below
    return "like data"


def draw_long(frame: pd.DataFrame, title: str) -> Figure:
    """For each run its chains from noise and, beside them, from data; curves of all runs below."""
    groups = [*zip(by_run(frame), COLOURS, strict=False)]
    last = max(frame["steps"].dropna())
    least = min(frame["K"])
    between = 0.35
    columns = frame["steps"].groupby([frame["path"], frame["images"]]).size().max()
    cell = min(0.8, (WIDTH - 2 * SIDE - between) / 2 / columns)

    def strips(own: pd.DataFrame, colour: str, header: float, canvas: Any, y: float) -> None:
        for start, left in (("noise", SIDE), ("data", (WIDTH + between) / 2)):
            rows = own[own["images"] == f"from {start}"]
            words = f"{own['run'].iloc[0]}: from {'held-out ' * (start == 'data')}{start}"
            canvas.write(left, y + 0.12, words, fontsize=10, ha="left", color=colour)
            lost = rows["count"] - rows["finite"]
            heads = [
                short(stop) + (f"\n{count} lost" if count else "")
                for stop, count in zip(rows["steps"], lost, strict=True)
            ]
            framed = [rows["steps"].tolist().index(own["K"].iloc[0])]
            stack = torch.stack(rows["shown"].tolist(), dim=1)
            show_chains(canvas, left, y + header, stack, heads, cell, framed=framed, colour=colour)

    def curve(name: str, level: float | None, axes: Axes) -> None:
        early, every = [TALLEST], [0.0]
        for own, colour in groups:
            for start, dashes in (("noise", "-"), ("data", "--")):
                rows = own[own["images"] == f"from {start}"]
                values = rows[name].astype(float).replace([math.inf, -math.inf], math.nan)
                axes.plot(
                    rows["steps"].tolist(), values, color=colour, ls=dashes, lw=1.4, marker="."
                )
                every += values.abs().dropna().tolist()
                early += values.abs()[rows["steps"] == 0].dropna().tolist()
            axes.axvline(own["K"].iloc[0], lw=0.8, alpha=0.6, color=colour)
            if level is None and name == "pull":
                of_data = own[own["images"] == "data"][name].iloc[0]
                axes.axhline(of_data, color=colour, lw=1.2, ls=":")
        if max(every) > TALLEST:
            axes.set_yscale("symlog", linthresh=1)
            # What diverges leaves the panel, and the other curves stay readable.
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -2 * max(early)), min(high, 2 * max(early)))
        if level is not None:
            axes.axhline(level, color=DARK, lw=1.2, ls=":")

    def finish(axes: Axes) -> None:
        axes.set_xscale("symlog", linthresh=least, linscale=0.5)
        # A power of ten in the linear part would lie on the 0.
        powers = (10**k for k in range(len(str(last))))
        axes.set_xticks([0, *(power for power in powers if power >= least)])
        axes.set_xlim(0, last)

    blocks: list[Block] = []
    for own, colour in groups:
        header = 0.5 + 0.18 * bool((own["finite"] < own["count"]).any())
        height = header + cell * len(own["shown"].iloc[0]) + 0.2
        blocks.append((height, partial(strips, own, colour, header)))
    curves: dict[str, tuple[str, float | None]] = {
        "mean f, off the data's, in its std": ("f_off", 0),
        "contrast, of the data's": ("contrast_of_data", 1),
        "variety of chains, of the data's": ("variety", 1),
        "distance to data, of held-out's": ("distance_of_held_out", 1),
        "rms distance to the chain's start": ("moved", None),
        "drift of a step over its noise": ("pull", None),
    }
    return page(
        title,
        "each row is one chain on its way, cut to [-1, 1] for display, red where it is not finite; "
        "numbers of steps above, K framed",
        blocks,
        Panels(
            "means over the chains that are still finite; solid: from noise; dashed: from held-out "
            "data; upright: K; level and dotted: data with the noise of training",
            {label: partial(curve, *of) for label, of in curves.items()},
            "steps",
            finish,
            [(own[ABOUT].iloc[0], {"color": colour}) for own, colour in groups],
            columns=1,
        ),
    )


def short(count: int) -> str:
    """A number of steps in few letters: 200, 5k, 2.5k, 1M."""
    for unit, size in (("M", 10**6), ("k", 1000)):
        if count >= size:
            return f"{count / size:g}{unit}"
    return str(count)


STUDIES = {
    "long-run": Study(
        "Chains that go on for long after K steps",
        "Nijkamp et al. (2020), section 3.3 and Figure 1",
        opened,
        long_chains,
        draw_long,
        f"{MEASURES}; held-out images have it too. Of the chains that are still finite. variety: "
        "root of the variance over chains, on the mean of all entries, over that of the data; "
        "below 1 many chains have become one image. f_off: mean f minus that of the data, in "
        "standard deviations of f over the data. pull: length of a step's drift over that of its "
        "noise. moved: distance to the chain's start. above, below: share of the chains beyond the "
        "data's 97.5% and 2.5% quantiles, low and high.",
        "after 100 K steps the chains from data are still like the data",
        lambda frame: bool(
            (frame.loc[frame["images"] == "from data", "verdict"].dropna() == "like data").all()
        ),
    ),
}
