"""Figures 15 and "interpolation": samples from the same noise, and the way from one to another.

Figure 15 of the robust objective; and Nijkamp et al. (2019), section 3.4:
z_rho = rho z1 + sqrt(1 - rho^2) z2, x = M(z_rho).
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
from matplotlib.lines import Line2D
from torch import Tensor

from ..plots.canvas import COLOURS, DARK, show_on, tiling
from ..plots.numbers import NONE
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
    data, count = runs[0].data, config.count or 64
    generator = torch.Generator(data.train_x.device).manual_seed(config.seed)
    order = torch.randperm(len(data.train_x), generator=generator, device=generator.device)
    shown = min(count, len(order) // 2)
    reference = data.scale(data.train_x[order[shown : shown + 1000]])

    def rows(run: TrainedRun, count: int, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        steps = run.settings.sgld_steps
        (x,) = shortrun.followed(run, run.starts(count, generator), (steps,), generator)
        yield {"updates": run.step, "K": steps, **quality(x, reference), "shown": x}

    frame = shortrun.each(runs, config, rows, count, by_beta_star=True)
    first = {"images": "training images", "shown": data.scale(data.train_x[order[:shown]])}
    own = frame.drop(columns=ABOUT).rename(columns={"run": "images"}).to_dict("records")
    last = {"images": "test images", **quality(data.scale(data.test_x[:count]), reference)}
    found = frame_of([first, *own, last]).fillna({"path": NONE})
    found.attrs["data"] = data.name
    return found


def quality(images: Tensor, reference: Tensor) -> dict[str, float]:
    """Images, (N, C, H, W), by training images: NaN where a pixel is not finite, but for counts."""
    lost = int((~images.isfinite().flatten(1).all(1)).sum())
    x = images.double() * (math.nan if lost else 1)
    cut = x.clamp(-1, 1)
    return {
        "count": len(x),
        "distance": energy_distance(cut, reference.double()),
        "beyond": (x - cut).abs().mean().item(),
        "not_finite": lost,
    }


def draw_samples(frame: pd.DataFrame, title: str) -> Figure:
    """Grids of images, by what stands above them."""
    rows = [row for row in frame.to_dict("records") if row["shown"] is not None]
    lines, columns = tiling(len(rows), 3)
    figure, (band,) = shortrun.picture(title, "", [3.3 * lines], width=0.4 + 3.1 * columns)
    for axes, row in zip(shortrun.tiles(band, len(rows), 3), rows, strict=True):
        axes.set_title(row["images"], fontsize=10.5, color=DARK)
        show_on(axes, row["shown"], math.isqrt(len(row["shown"]) - 1) + 1)
    return figure


def paths(run: TrainedRun, count: int, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Paths between pairs of starts, and their images by the flow of training's K without noise."""
    z1, z2 = run.starts(2 * count, generator).chunk(2)
    starts = between(z1, z2, arc(POINTS))
    parts = [
        flow(run.network, part, steps=run.settings.sgld_steps, step_size=run.step_size)
        for part in torch.split(starts.flatten(0, 1), BATCH)
    ]
    images = torch.cat(parts).reshape(starts.shape)
    found: dict[str, Any] = {**course(images)}
    for kind, x in (("path", images), ("blend", straight(images))):
        measured = measure(run, x.flatten(0, 1))
        for name in NAMES:
            along = measured[name].to_numpy().reshape(count, POINTS)
            found[f"{name}_ends"] = along[:, [0, -1]].mean(1)
            found[f"{name}_{kind}"] = along[:, 1:-1].mean(1)
            found[f"{name}_along_{kind}"] = along
        found[f"{kind}_images"] = x
    yield from ({"pair": str(i + 1), **{k: x[i] for k, x in found.items()}} for i in range(count))
    held_out = means(measure(run, shortrun.some_of(run, run.data.test_x, generator)))
    yield {"pair": "held-out", **{f"{name}_ends": held_out[name] for name in NAMES}}


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
        distance of the ends, 1 of a straight line; "halved", the largest step over that of every
        other point: towards 1/2 the path is smooth at this spacing, near 1 it jumps; and "steps",
        (P, N - 1), each over the distance of the ends.
    """
    points = path.detach().cpu().double().flatten(2)
    steps, wide = (p.diff(dim=1).square().mean(-1).sqrt() for p in (points, points[:, ::2]))
    apart = (points[:, -1] - points[:, 0]).square().mean(dim=-1).sqrt()
    found = {"apart": apart, "length": steps.sum(dim=1) / apart}
    found |= {"halved": steps.amax(1) / wide.amax(1), "steps": steps / apart[:, None]}
    return {name: x.numpy() for name, x in found.items()}


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
    shown = min(PAIRS, len(runs[0][0]))
    words = (
        "x = M(ρ z1 + √(1 − ρ²) z2), the steps of training without noise, cut to [-1, 1]; "
        "ρ at even angles"
    )
    figure, bands = shortrun.picture(title, words, [0.6 + 0.95 * (shown + 1)] * len(runs) + [6])
    heads = [f"ρ = {rho:.2f}" for rho in arc(POINTS)[::EVERY].tolist()]
    for band, (pairs, last, colour) in zip(bands, runs, strict=False):
        images = [(f"pair {i + 1}", x[::EVERY]) for i, x in enumerate(pairs["path_images"][:shown])]
        # Under the pair whose ends it has.
        images.insert(1, ("pixel blend\nof pair 1", pairs["blend_images"].iloc[0][::EVERY]))
        band.suptitle(last[ABOUT], fontsize=10, color=colour)
        shortrun.strip(band.subplots(), images, heads)

    def along(name: str, axes: Axes) -> None:
        for pairs, last, colour in runs:
            # Each run's f has a zero of its own; each step is at the angle of its middle.
            zero = last["f_ends"] if name == "f" else 0.0
            if name == "steps":
                own, blend = np.stack(pairs[name]), np.full(POINTS - 1, 1 / (POINTS - 1))
            else:
                own, blend = (
                    np.stack(pairs[f"{name}_along_{k}"]) - zero for k in ("path", "blend")
                )
                blend = blend.mean(0)
                axes.axhline(last[f"{name}_ends"] - zero, color=colour, lw=1.2, ls=":")
            x = np.linspace(0, 90, POINTS)[: len(blend)] + (45 / (POINTS - 1)) * (name == "steps")
            axes.plot(x, own.T, color=colour, lw=0.6, alpha=0.35)
            axes.plot(x, own.mean(0), color=colour, lw=2)
            axes.plot(x, blend, color=colour, lw=1.5, ls="--")
        axes.set_xticks((0, 30, 60, 90))
        axes.set_xlim(0, 90)

    titles = {
        "f": "f, less that of held-out images",
        "distance": "distance to the nearest training image",
        "contrast": "contrast",
        "excess": "mean excess beyond [-1, 1]",
        "slope": "length of ∇f",
        "steps": "length of a step, of the ends' distance",
    }
    shortrun.curves(
        bands[-1],
        "pairs thin, their means bold; dashed: pixel blends; dotted: held-out images",
        {title: partial(along, name) for name, title in titles.items()},
        "angle (degrees), 0 is z2 and 90 is z1",
        [Line2D([], [], lw=2, color=colour, label=last["run"]) for _, last, colour in runs],
        columns=2,
    )
    return figure


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
        partial(shortrun.each, rows=paths, count=8, most=len(COLOURS)),
        draw_paths,
        "apart: root mean square difference of the ends of a path. length: over the distance of "
        "its ends; halved: "
        "largest step over that with every other point left out, 0.5 for a smooth path and 1 for a "
        "jump. blend: straight line between the two end images. f, distance to the nearest "
        "training image, contrast, excess beyond [-1, 1] and slope, the length of ∇f: at the "
        "ends, and means between them.",
        "between the ends f is nearer to that at the ends on the path than on the pixel blend",
        nearer,
    ),
}
