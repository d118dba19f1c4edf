"""Samples of short-run models from the same noise, and after other numbers of steps.

Figure 15 of the robust objective, and question 3 of the author response of Nijkamp et al. (2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..plots.canvas import COLOURS, DARK
from ..plots.page import SIDE, WIDTH, Panels, grid, page, show_chains, show_on
from ..shortrun.trained import TrainedRun
from .config import ShortRunFigure
from .measures import BATCH, energy_distance, means, measure
from .shortrun import (
    MEASURES,
    by_beta,
    by_run,
    caution,
    check_runs,
    followed,
    named,
    negatives,
    noisy,
    opened,
    ordered,
    over,
    some_of,
)
from .study import ABOUT, Study, ascending, frame_of

SHOWN = 3
"""Chains whose images are kept."""
LINES = ("-", "--", ":")
INTERVALS = 10


def samples(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Training images, samples of every run from the same noise, and test images: Figure 15.

    The training images that the others are compared with are not those that are shown.
    """
    of_beta, count = ordered(runs), config.count or 64
    check_runs(runs, "15")
    data = runs[0].data
    generator = torch.Generator(data.train_x.device).manual_seed(config.seed)
    order = torch.randperm(len(data.train_x), generator=generator, device=generator.device)
    shown = min(count, len(order) // 2)
    reference = data.scale(data.train_x[order[shown : shown + 1000]])
    rows: list[dict[str, Any]] = [
        {"images": "training images", "shown": data.scale(data.train_x[order[:shown]])}
    ]
    for label, run in of_beta:
        generator.manual_seed(config.seed)
        x = negatives(run, run.starts(count, generator), generator)
        own = {"path": str(run.path), "seed": run.config.seed, "updates": run.step}
        own |= {"K": run.settings.sgld_steps, "beta_star": float(run.config.beta_star)}
        rows.append({"images": label, **own, **quality(x, reference), "shown": x})
    test = data.scale(data.test_x[:count])
    frame = frame_of([*rows, {"images": "test images", **quality(test, reference)}])
    frame.attrs |= {"note": caution(runs), "data": runs[0].data.name}
    return frame


def quality(images: Tensor, reference: Tensor) -> dict[str, float]:
    """Images, (N, C, H, W), by training images: NaN where a pixel is not finite, but for counts."""
    finite, x = images.isfinite(), images.double()
    cut = x.clamp(-1, 1)
    found = {"distance": math.nan, "mean": math.nan, "std": math.nan, "beyond": math.nan}
    if finite.all():
        found["distance"] = energy_distance(cut, reference.double())
        found |= {"mean": x.mean().item(), "std": x.std(correction=0).item()}
        found["beyond"] = (x - cut).abs().mean().item()
    return {"count": len(x), **found, "not_finite": int((~finite.flatten(1).all(1)).sum())}


def draw_samples(frame: pd.DataFrame, title: str) -> Figure:
    """Grids of images, by what stands above them."""
    rows = [row for row in frame.to_dict("records") if row["shown"] is not None]
    size, sides = (3.0, 3.0), (0.2, 0.2, 0.2)
    canvas, panels = grid(title, "", len(rows), 3, size, sides=sides, top=0.9, below=0.4)
    for axes, row in zip(panels, rows, strict=True):
        axes.set_title(row["images"], fontsize=10.5, color=DARK)
        show_on(axes, row["shown"], math.isqrt(len(row["shown"]) - 1) + 1)
    return canvas.figure


def steps(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Chains from noise, as in training, looked at before, at and after training's K steps.

    One chain gives all stops. Runs with images of one shape have the same starts and noise.
    """
    check_runs(runs, "steps", most=len(COLOURS) * len(LINES))
    stops = even_stops(trained := [run.settings.sgld_steps for run in runs])
    stops = tuple(sorted({*stops, *trained, *(2 * k for k in trained)}))
    return frame_of([row for run in runs for row in _swept(run, stops, config)])


def even_stops(trained: Sequence[int]) -> tuple[int, ...]:
    """Eleven even numbers of steps from 0 to twice the largest K of the runs."""
    last = 2 * max(trained)
    return tuple(sorted({round(i * last / INTERVALS) for i in range(INTERVALS + 1)}))


def _swept(
    run: TrainedRun, stops: Sequence[int], config: ShortRunFigure
) -> Iterator[dict[str, Any]]:
    generator = torch.Generator(run.device).manual_seed(config.seed)
    x = run.starts(config.count or 128, generator)
    states = list(followed(run, x, stops, generator, BATCH))
    generator.manual_seed(config.seed)
    clean = some_of(run, run.data.train_x, generator)
    data = means(measure(run, noisy(run, clean, generator)))
    held_out = means(measure(run, some_of(run, run.data.test_x, generator)))
    low, high = run.settings.sgld_steps, run.settings.most_sgld_steps
    own = {**named(run), "K": low, "most_K": high}
    for stop, x in zip(stops, states, strict=True):
        found = means(measure(run, x))
        row = {**own, "images": "chains", "steps": stop, **found, "gap": data["f"] - found["f"]}
        for name in ("contrast", "colour", "distance"):
            row[f"{name}_of_data"] = over(found, held_out if name == "distance" else data, name)
        yield row | {"count": len(x), "shown": x[:SHOWN].cpu()}
    yield {**own, "images": "data", **data}
    yield {**own, "images": "data without noise", **means(measure(run, clean))}
    yield {**own, "images": "held-out", **held_out}


def over_saturated(frame: pd.DataFrame) -> bool | None:
    """Whether contrast grows from K to 2 K steps, and beyond that of data, in every run."""
    said = []
    for rows in by_run(frame[frame["images"] == "chains"]):
        ratio, first = rows.set_index("steps")["contrast_of_data"], rows["K"].iloc[0]
        early, late = ratio[first], ratio[2 * first]
        said.append(None if math.isnan(early - late) else late > max(early, 1.0))
    return None if None in said else all(said)


def draw_steps(frame: pd.DataFrame, title: str) -> Figure:
    """A strip of images for each run, K marked, and curves of all runs below."""
    groups = by_run(frame)
    chains = [own[own["images"] == "chains"] for own in groups]
    data = [own[own["images"] == "data"].iloc[0] for own in groups]
    styles = [
        {"color": COLOURS[i % len(COLOURS)], "ls": LINES[i // len(COLOURS)]}
        for i in range(len(groups))
    ]
    trained = [own["K"].iloc[0] for own in chains]
    shown = sorted({*even_stops(trained), *trained})
    cell = min(0.95, (WIDTH - 2 * SIDE) / len(shown))
    left, header = (WIDTH - cell * len(shown)) / 2, 0.55

    def strip(own: pd.DataFrame, colour: str, canvas: Any, y: float) -> None:
        low, high = own["K"].iloc[0], own["most_K"].iloc[0]
        canvas.write(left, y + 0.12, own[ABOUT].iloc[0], fontsize=10, ha="left", color=colour)
        images = own.set_index("steps")["shown"]
        labels = [f"{'K1 = ' if stop == low else ''}{stop}" for stop in shown]
        framed = [i for i, stop in enumerate(shown) if low <= stop <= high]
        stack = torch.stack([images[stop] for stop in shown], dim=1)
        show_chains(canvas, left, y + header, stack, labels, cell, framed=framed, colour=colour)

    def curve(name: str, level: float | None, axes: Axes) -> None:
        for own, of_data, style in zip(chains, data, styles, strict=True):
            axes.plot(own["steps"].tolist(), own[name].tolist(), lw=1.4, **style)  # type: ignore[arg-type]
            low, high = own["K"].iloc[0], own["most_K"].iloc[0]
            if low == high:
                axes.axvline(low, lw=0.8, alpha=0.6, **style)  # type: ignore[arg-type]
            else:
                axes.axvspan(low, high, color=style["color"], alpha=0.12, lw=0)
            if level is None:
                axes.axhline(of_data[name], color=style["color"], lw=1.2, ls=":")
        if level is not None:
            axes.axhline(level, color=DARK, lw=1.2, ls=":")

    def finish(axes: Axes) -> None:
        axes.yaxis.set_major_formatter("{x:.4g}")
        axes.set_xlim(0, max(frame["steps"].dropna()))

    names: dict[str, tuple[str, float | None]] = {
        "contrast, of the data's": ("contrast_of_data", 1),
        "colour, of the data's": ("colour_of_data", 1),
        "share shown as black or white": ("ends", None),
        "mean excess beyond [-1, 1]": ("excess", None),
        "mean f(data) − mean f(x⁻)": ("gap", 0),
        "distance to data, of that of held-out": ("distance_of_data", 1),
        "mean length of ∇f": ("slope", None),
    }
    if not any(row["colour"] for row in data):
        del names["colour, of the data's"]
    caption = f"means over {frame['count'].iloc[0]:,} chains; upright: K1; level and dotted: data"
    return page(
        title,
        "each row is one chain on its way, cut to [-1, 1] for display; runs with images of one "
        "shape have the same starts and noise",
        [
            (header + cell * len(own["shown"].iloc[0]) + 0.15, partial(strip, own, style["color"]))
            for own, style in zip(chains, styles, strict=True)
        ],
        Panels(
            f"{caption} with the noise of training",
            {label: partial(curve, *of) for label, of in [*names.items()][:6]},
            "K2",
            finish,
            [(own["run"].iloc[0], style) for own, style in zip(groups, styles, strict=True)],
        ),
    )


STUDIES = {
    "15": Study(
        "Figure 15: negatives of SGLD from the same noise",
        "robust objective, Appendix L, Figure 15",
        opened,
        samples,
        draw_samples,
        "distance: energy distance in pixels to training images that are not shown. beyond: how "
        "far pixels lie beyond [-1, 1], on average; they are clipped when drawn and compared. "
        "Pixels that are not finite are red.",
        "the negatives' distance to training images grows with every step up of β*",
        lambda frame: ascending(by_beta(frame.dropna(subset="beta_star"), "distance").tolist()),
    ),
    "steps": Study(
        "Sampling with K2 steps what was trained with K1",
        "Nijkamp et al. (2019), author response, question 3",
        opened,
        steps,
        draw_steps,
        f"{MEASURES}, what 'of data' refers to; the distance's is that of held-out images. gap: "
        "mean f(data) − mean f(x⁻).",
        "over-saturation for K2 > K1: contrast grows from K1 to 2 K1, and beyond the data's",
        over_saturated,
    ),
}
