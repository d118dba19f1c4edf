"""Figures 15 and "interpolation": samples from the same noise, and the way from one to another.

Figure 15 of the robust objective; and Nijkamp et al. (2019), section 3.4:
z_rho = rho z1 + sqrt(1 - rho^2) z2, x = M(z_rho).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..plots.canvas import COLOURS, DARK
from ..plots.markdown import NONE
from ..plots.page import BETWEEN, WIDTH, Panels, grid, page, show_on, show_rows
from ..shortrun.flow.density import flow
from ..shortrun.trained import TrainedRun
from . import shortrun
from .config import ShortRunFigure
from .measures import BATCH, energy_distance, means, measure
from .study import ABOUT, Study, ascending, frame_of

POINTS = 21
"""Of a path. Odd, so that every other one of them makes a path from end to end too."""
PAIRS, EVERY = 4, 2
"""Pairs whose images are shown, and of the points of their paths one in so many."""
NAMES = ("f", "distance", "contrast", "excess", "slope")


def samples(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Training images, samples of every run from the same noise, and test images: Figure 15.

    The training images that the others are compared with are not those that are shown.
    """
    of_beta, count = shortrun.ordered(runs), config.count or 64
    shortrun.check_runs(runs, "15")
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
        steps = run.settings.sgld_steps
        (x,) = shortrun.followed(run, run.starts(count, generator), (steps,), generator)
        own = {**shortrun.named(run, label), "updates": run.step, "K": steps}
        rows.append({"images": label, **own, **quality(x, reference), "shown": x})
    test = data.scale(data.test_x[:count])
    frame = frame_of([*rows, {"images": "test images", **quality(test, reference)}])
    frame.attrs["data"] = data.name
    return frame.drop(columns=[ABOUT, "run"]).fillna({"path": NONE})


def quality(images: Tensor, reference: Tensor) -> dict[str, float]:
    """Images, (N, C, H, W), by training images: NaN where a pixel is not finite, but for counts."""
    lost = int((~images.isfinite().flatten(1).all(1)).sum())
    x = images.double() * (math.nan if lost else 1)
    cut = x.clamp(-1, 1)
    return {
        "count": len(x),
        "distance": energy_distance(cut, reference.double()),
        "mean": x.mean().item(),
        "std": x.std(correction=0).item(),
        "beyond": (x - cut).abs().mean().item(),
        "not_finite": lost,
    }


def draw_samples(frame: pd.DataFrame, title: str) -> Figure:
    """Grids of images, by what stands above them."""
    rows = [row for row in frame.to_dict("records") if row["shown"] is not None]
    size, sides = (3.0, 3.0), (0.2, 0.2, 0.2)
    canvas, panels = grid(title, "", len(rows), 3, size, sides=sides, top=0.9, below=0.4)
    for axes, row in zip(panels, rows, strict=True):
        axes.set_title(row["images"], fontsize=10.5, color=DARK)
        show_on(axes, row["shown"], math.isqrt(len(row["shown"]) - 1) + 1)
    return canvas.figure


def paths(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Paths between pairs of starts, and their images by the flow of training's K without noise."""
    shortrun.check_runs(runs, "interpolation", most=len(COLOURS))
    return frame_of([row for run in runs for row in _paths(run, config.count or 8, config.seed)])


def _paths(run: TrainedRun, count: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator(run.device).manual_seed(seed)
    z1, z2 = run.starts(2 * count, generator).chunk(2)
    starts = between(z1, z2, arc(POINTS))
    parts = [
        flow(run.network, part, steps=run.settings.sgld_steps, step_size=run.step_size)
        for part in torch.split(starts.flatten(0, 1), BATCH)
    ]
    images = torch.cat(parts).reshape(starts.shape)
    held_out = means(measure(run, shortrun.some_of(run, run.data.test_x, generator)))
    found: dict[str, Any] = {**course(images), "starts_length": course(starts)["length"]}
    for kind, x in (("path", images), ("blend", straight(images))):
        measured = measure(run, x.flatten(0, 1))
        for name in NAMES:
            along = measured[name].to_numpy().reshape(count, POINTS)
            found[f"{name}_ends"] = along[:, [0, -1]].mean(1)
            found[f"{name}_{kind}"] = along[:, 1:-1].mean(1)
            found[f"{name}_along_{kind}"] = along
        found[f"{kind}_images"] = x
    rows = [{"pair": str(i + 1), **{k: x[i] for k, x in found.items()}} for i in range(count)]
    last = {"pair": "held-out", **{f"{name}_ends": held_out[name] for name in NAMES}}
    return [{**shortrun.named(run), **row} for row in (*rows, last)]


def arc(points: int) -> Tensor:
    """rho = sin(angle) for even angles from 0 to a right one, (points,) float64.

    On z_rho = rho z1 + sqrt(1 - rho^2) z2 even angles are even steps. Even steps of rho are not: of
    ten the last one alone goes over 29% of the way.
    """
    return torch.sin(torch.linspace(0, math.pi / 2, points, dtype=torch.float64))


def between(z1: Tensor, z2: Tensor, rho: Tensor) -> Tensor:
    """rho z1 + sqrt(1 - rho^2) z2: z2 at rho = 0, z1 at 1; the variance of both where they agree.

    Args:
        z1, z2: (P, ...), independent of each other.
        rho: (N,) in [0, 1].

    Returns:
        (P, N, ...). Entries of z1 and z2 in [-1, 1] give entries up to sqrt(2).
    """
    shape = (1, -1, *[1] * (z1.ndim - 1))
    first = rho.to(z1).reshape(shape)
    second = (1 - rho.square()).clamp(min=0).sqrt().to(z1).reshape(shape)
    return first * z1[:, None] + second * z2[:, None]


def straight(path: Tensor) -> Tensor:
    """Even steps on the straight line between the ends of paths, (P, N, ...), shaped as they."""
    share = torch.linspace(0, 1, path.shape[1], dtype=path.dtype, device=path.device)
    return torch.lerp(path[:, :1], path[:, -1:], share.reshape(1, -1, *[1] * (path.ndim - 2)))


def course(path: Tensor) -> dict[str, np.ndarray]:
    """How evenly paths go, (P, N, ...) with an odd N of 3 or more.

    Returns:
        each of P: "apart", root mean square difference of the ends; "length" of all steps, over the
        distance of the ends, 1 of a straight line; "largest" step over the mean step; "halved", the
        largest step over that of every other point: towards 1/2 the path is smooth at this spacing,
        near 1 it jumps; and "steps", (P, N - 1), each over the distance of the ends.
    """
    points = path.detach().cpu().double().flatten(2)
    steps, wide = (p.diff(dim=1).square().mean(-1).sqrt() for p in (points, points[:, ::2]))
    apart = (points[:, -1] - points[:, 0]).square().mean(dim=-1).sqrt()
    largest = steps.amax(dim=1)
    found = {"apart": apart, "length": steps.sum(dim=1) / apart}
    found |= {"largest": largest / steps.mean(dim=1), "halved": largest / wide.amax(dim=1)}
    return {name: x.numpy() for name, x in found.items()} | {
        "steps": (steps / apart[:, None]).numpy()
    }


def nearer(frame: pd.DataFrame) -> bool | None:
    """Whether f on the path is nearer than on the blend to that of the ends, in most pairs."""
    pairs = frame[frame["pair"] != "held-out"]
    off, blend = (
        (pairs[f"f_{kind}"] - pairs["f_ends"]).astype(float).abs() for kind in ("path", "blend")
    )
    if not np.isfinite([off, blend]).all():
        return None
    return bool(((off < blend).groupby(pairs["path"]).mean() > 0.5).all())


def draw_paths(frame: pd.DataFrame, title: str) -> Figure:
    """Rows of images for each run, with the pixel blend of its first pair, and curves below."""
    groups = zip(shortrun.by_run(frame), COLOURS, strict=False)
    runs = [(own.iloc[:-1], own.iloc[-1], colour) for own, colour in groups]
    label, header = 1.15, 0.5
    cell = (WIDTH - label - 0.3) / len(range(0, POINTS, EVERY))

    def rows(pairs: pd.DataFrame, last: Any, colour: str, canvas: Any, y: float) -> None:
        canvas.write(label, y + 0.12, last[ABOUT], fontsize=10, ha="left", color=colour)
        for i, rho in enumerate(arc(POINTS)[::EVERY].tolist()):
            words = f"{'ρ = ' if i == 0 else ''}{rho:.2f}"
            canvas.write(label + (i + 0.5) * cell, y + header - 0.11, words, fontsize=9, color=DARK)
        shown = pairs.iloc[:PAIRS]
        images = [(f"pair {p}", x[::EVERY]) for p, x in shown[["pair", "path_images"]].to_numpy()]
        # Under the pair whose ends it has.
        images.insert(1, ("pixel blend\nof pair 1", shown["blend_images"].iloc[0][::EVERY]))
        show_rows(canvas, label, y + header, images, cell)

    def each(axes: Axes, x: Any, values: np.ndarray, colour: str) -> None:
        axes.plot(x, values.T, color=colour, lw=0.6, alpha=0.35)
        axes.plot(x, values.mean(axis=0), color=colour, lw=2)

    def along(name: str, axes: Axes) -> None:
        for pairs, last, colour in runs:
            level = last[f"{name}_ends"]
            # Each run's f has a zero of its own.
            zero = level if name == "f" else 0.0
            own, blend = (np.stack(pairs[f"{name}_along_{k}"]) - zero for k in ("path", "blend"))
            each(axes, angles, own, colour)
            axes.plot(angles, blend.mean(axis=0), color=colour, lw=1.5, ls="--")
            axes.axhline(level - zero, color=colour, lw=1.2, ls=":")

    def steps(axes: Axes) -> None:
        for pairs, _, colour in runs:
            own = np.stack(pairs["steps"])
            each(axes, (angles[:-1] + angles[1:]) / 2, own, colour)
            axes.axhline(1 / own.shape[1], color=colour, lw=1.5, ls="--")
        axes.set_ylim(bottom=0)

    def finish(axes: Axes) -> None:
        axes.set_xticks((0, 30, 60, 90))
        axes.set_xlim(0, 90)
        axes.yaxis.set_major_formatter("{x:.4g}")

    angles = np.linspace(0, 90, POINTS)
    return page(
        title,
        "x = M(ρ z1 + √(1 − ρ²) z2), the steps of training without noise; ρ at even angles; cut to "
        "[-1, 1] for display",
        [
            (header + (min(PAIRS, len(p)) + 1) * (cell + BETWEEN) + 0.2, partial(rows, p, *rest))
            for p, *rest in runs
        ],
        Panels(
            f"means over {len(runs[0][0]):,} pairs in bold, each pair thin; dashed: pixel blends; "
            "dotted: held-out images",
            {
                "f, less that of held-out images": partial(along, "f"),
                "distance to the nearest training image": partial(along, "distance"),
                "contrast": partial(along, "contrast"),
                "mean excess beyond [-1, 1]": partial(along, "excess"),
                "length of ∇f": partial(along, "slope"),
                "length of a step, of the ends' distance": steps,
            },
            "angle (degrees), 0 is z2 and 90 is z1",
            finish,
            [(last["run"], {"color": colour}) for _, last, colour in runs],
        ),
    )


STUDIES = {
    "15": Study(
        "Figure 15: negatives of SGLD from the same noise",
        "robust objective, Appendix L, Figure 15",
        shortrun.opened,
        samples,
        draw_samples,
        "distance: energy distance in pixels to training images that are not shown. beyond: how "
        "far pixels lie beyond [-1, 1], on average; they are clipped when drawn and compared. "
        "Pixels that are not finite are red.",
        "the negatives' distance to training images grows with every step up of β*",
        lambda frame: ascending(
            shortrun.by_beta(frame.dropna(subset="beta_star"), "distance").tolist()
        ),
    ),
    "interpolation": Study(
        "Between two samples, through the noise they come from",
        "Nijkamp et al. (2019), section 3.4",
        shortrun.opened,
        paths,
        draw_paths,
        "apart: root mean square difference of the ends of a path. length: over the distance of "
        "its ends, of the path and of its starts; largest: step over the mean step; halved: "
        "largest step over that with every other point left out, 0.5 for a smooth path and 1 for a "
        "jump. blend: straight line between the two end images. f, distance to the nearest "
        "training image, contrast, excess beyond [-1, 1] and slope, the length of ∇f: at the "
        "ends, and means between them.",
        "between the ends f is nearer to that at the ends on the path than on the pixel blend",
        nearer,
    ),
}
