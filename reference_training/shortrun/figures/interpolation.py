"""Figure "interpolation": images between two samples, through the noise that they come from.

Nijkamp et al. (2019), section 3.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.figure import Made
from ...plots.markdown import NONE, markdown_table
from ...plots.page import BETWEEN, WIDTH, Panels, page, show_rows
from .config import FigureConfig
from .measured import describe
from .paths import POINTS, Paths, course, interpolate, outside, spread
from .several import at_most, from_noise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..trained import TrainedRun

MOST_RUNS = len(COLOURS)
PAIRS = 4
"""Whose images are shown."""
EVERY = 2
"""Of the points of a path, so many apart are shown."""
LABEL, HEADER = 1.15, 0.5
"""Room on the left of a run's images and above them, in inches."""
CELL = (WIDTH - LABEL - 0.3) / len(range(0, POINTS, EVERY))
NAMES = ("f", "distance", "contrast")

COUNT = 8
"""Pairs of each run."""

LEGEND = (
    "z_ρ = ρ z1 + √(1 − ρ²) z2 at even angles, x = M(z_ρ), the K steps of training without noise. "
    "Apart: root mean square difference of the ends. Length: of the path over the distance of its "
    "ends, of its starts likewise; largest: step over the mean step; halved: largest step over "
    "that with every other point left out, 0.5 for a smooth path and 1 for a jump. Blend: straight "
    "line between the two end images. f, distance to the nearest training image (root mean square, "
    "cut to [-1, 1]) and contrast (standard deviation of an image's entries): at the ends, and "
    "means between them."
)


def make(runs: Sequence[TrainedRun], config: FigureConfig) -> Made:
    """Interpolate between samples of every run, from the same starts.

    Args:
        runs: any, if their chains start from noise.
        config: `count` is the number of pairs.

    Raises:
        ConfigError: a run's chains go on from update to update, or there are more runs than
            colours.
        ImportError: matplotlib is not installed.
    """
    from_noise(runs, "Figure interpolation")
    at_most(runs, MOST_RUNS)
    found = [interpolate(run, count=config.count or COUNT, seed=config.seed) for run in runs]
    said = [sentence for paths in found for sentence in statements(paths)]
    text = "\n\n".join([LEGEND, *map(table, found), "\n".join(said)])
    return Made(draw(found), text, {"runs": [_numbers(p) for p in found], "statements": said})


def table(paths: Paths) -> str:
    """A run's numbers: a line for each pair, their means, and held-out images."""
    head = ["pair", "apart", "length", "starts'", "largest", "halved"]
    head += [f"{name} {at}".strip() for name in NAMES for at in ("at ends", "path", "blend")]
    own, starts = course(paths.images), course(paths.starts)
    columns = [own.apart, own.length, starts.length, own.largest, own.halved]
    for name in NAMES:
        columns.append(paths.along(name)[:, [0, -1]].mean(dim=1))
        columns += [paths.along(name, blend=b)[:, 1:-1].mean(dim=1) for b in (False, True)]
    values = torch.stack(columns, dim=1)
    rows = [[str(i + 1), *map(_number, row)] for i, row in enumerate(values.tolist())]
    rows.append(["mean", *map(_number, values.mean(dim=0).tolist())])
    held_out = [cell for name in NAMES for cell in (_number(paths.held_out.mean(name)), NONE, NONE)]
    rows.append(["held-out", *[NONE] * 5, *held_out])
    title = f"{describe(paths.run)}; {len(paths.images):,} pairs, {len(paths.rho)} points each"
    return f"{title}\n\n{markdown_table(head, rows)}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def statements(paths: Paths) -> list[str]:
    """Three sentences that follow from a run's numbers: smoothness, likeness, and the starts."""
    return [_on_smoothness(paths), _on_likeness(paths), _on_starts(paths)]


def _on_smoothness(paths: Paths) -> str:
    own, starts = course(paths.images), course(paths.starts)
    lost = int((~own.length.isfinite()).sum())
    if lost:
        return f"{paths.run.name}: nothing can be said; {lost} paths are not finite."
    return (
        f"{paths.run.name}: a path is {own.length.mean():.2f} times as long as the distance of its "
        f"ends (its starts': {starts.length.mean():.2f}); its largest step is "
        f"{own.largest.mean():.2f} of the mean one (the worst of {len(own.length)}: "
        f"{own.largest.max():.2f}), and {own.halved.mean():.2f} (the worst: "
        f"{own.halved.max():.2f}) of the largest at twice the spacing, where a smooth path has "
        "0.5 and a jump 1."
    )


def _on_likeness(paths: Paths) -> str:
    if not all(
        paths.along(name, blend=b).isfinite().all() for name in NAMES for b in (False, True)
    ):
        return f"{paths.run.name}, between the ends: nothing can be said; not all is finite."
    parts = []
    for name in NAMES:
        ends = paths.along(name)[:, [0, -1]].mean(dim=1)
        off, blend_off = (
            (paths.along(name, blend=b)[:, 1:-1].mean(dim=1) - ends).abs() for b in (False, True)
        )
        path, blend = (paths.inside(name, blend=b) for b in (False, True))
        parts.append(
            f"{name} {path:.3f} on the path and {blend:.3f} on the blend, {ends.mean():.3f} at the "
            f"ends, which the path is nearer to in {int((off < blend_off).sum())} of {len(off)} "
            "pairs"
        )
    return (
        f"{paths.run.name}, between the ends: {'; '.join(parts)}. A blend's lost contrast alone "
        "brings it nearer to images in mean square."
    )


def _on_starts(paths: Paths) -> str:
    shares = outside(paths.starts)
    most = int(shares.argmax())
    own, convex = (spread(z)[len(paths.rho) // 2] for z in (paths.starts, paths.convex))
    return (
        f"{paths.run.name}: z_ρ leaves the cube [-1, 1] with up to {shares[most]:.1%} of its "
        f"entries (at ρ = {paths.rho[most]:.2f}), as far as {paths.starts.abs().max():.2f} (√2 = "
        f"{math.sqrt(2):.2f} is the most), and half-way has {own:.2f} of the standard deviation of "
        f"z. A convex combination would stay inside, with {convex:.2f} half-way."
    )


def _numbers(paths: Paths) -> dict[str, Any]:
    own, starts = course(paths.images), course(paths.starts)
    return {
        "run": str(paths.run.path),
        "name": paths.run.name,
        "rho": paths.rho.tolist(),
        "path": {name: value.tolist() for name, value in own._asdict().items()},
        "starts_length": starts.length.tolist(),
        "starts_outside": outside(paths.starts).tolist(),
        "starts_spread": spread(paths.starts).tolist(),
        "convex_spread": spread(paths.convex).tolist(),
        "starts_largest": paths.starts.abs().max().item(),
        "held_out": {name: paths.held_out.mean(name) for name in NAMES},
        "along_path": {name: paths.along(name).tolist() for name in NAMES},
        "along_blend": {name: paths.along(name, blend=True).tolist() for name in NAMES},
    }


def draw(found: Sequence[Paths]) -> Figure:
    """Rows of images for each run, with the pixel blend of its first pair, and curves below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    coloured = list(zip(found, COLOURS, strict=False))
    blocks = []
    for paths, colour in coloured:
        rows = min(PAIRS, len(paths.images)) + 1
        height = HEADER + rows * (CELL + BETWEEN) + 0.2
        blocks.append((height, partial(_draw_rows, paths, colour)))

    def curves_of_all(curve: Curve, axes: Axes) -> None:
        for paths, colour in coloured:
            curve(axes, paths, colour)

    return page(
        "Between two samples, through the noise they come from",
        "x = M(ρ z1 + √(1 − ρ²) z2), the steps of training without noise; ρ at even angles; cut to "
        "[-1, 1] for display",
        blocks,
        Panels(
            f"means over {len(found[0].images):,} pairs in bold, each pair thin; dashed: pixel "
            "blends; dotted: held-out images",
            {title: partial(curves_of_all, curve) for title, curve in CURVES.items()},
            "angle (degrees), 0 is z2 and 90 is z1",
            _finish,
            [(paths.run.name, {"color": colour}) for paths, colour in coloured],
        ),
    )


def _draw_rows(paths: Paths, colour: str, canvas: Canvas, y: float) -> None:
    canvas.write(LABEL, y + 0.12, describe(paths.run), fontsize=10, ha="left", color=colour)
    for i, rho in enumerate(paths.rho[::EVERY].tolist()):
        label = f"{'ρ = ' if i == 0 else ''}{rho:.2f}"
        canvas.write(LABEL + (i + 0.5) * CELL, y + HEADER - 0.11, label, fontsize=9, color=DARK)
    pairs = [(f"pair {i + 1}", images[::EVERY]) for i, images in enumerate(paths.images[:PAIRS])]
    # Under the pair whose ends it has.
    pairs.insert(1, ("pixel blend\nof pair 1", paths.blends[0, ::EVERY]))
    show_rows(canvas, LABEL, y + HEADER, pairs, CELL)


def _finish(axes: Axes) -> None:
    axes.set_xticks((0, 30, 60, 90))
    axes.set_xlim(0, 90)
    axes.yaxis.set_major_formatter("{x:.4g}")


Curve = Callable[["Axes", Paths, str], None]


def _angles(count: int) -> list[float]:
    return [90 * i / (count - 1) for i in range(count)]


def _along(name: str, *, less_data: bool = False) -> Curve:
    def curve(axes: Axes, paths: Paths, colour: str) -> None:
        held_out = paths.held_out.mean(name)
        zero = held_out if less_data else 0.0
        own, blend = (paths.along(name, blend=b) - zero for b in (False, True))
        at = _angles(own.shape[1])
        axes.plot(at, own.T.tolist(), color=colour, lw=0.6, alpha=0.35)
        axes.plot(at, own.mean(dim=0).tolist(), color=colour, lw=2)
        axes.plot(at, blend.mean(dim=0).tolist(), color=colour, lw=1.5, ls="--")
        axes.axhline(held_out - zero, color=colour, lw=1.2, ls=":")

    return curve


def _steps(axes: Axes, paths: Paths, colour: str) -> None:
    steps = course(paths.images).steps
    at = [90 * (i + 0.5) / steps.shape[1] for i in range(steps.shape[1])]
    axes.plot(at, steps.T.tolist(), color=colour, lw=0.6, alpha=0.35)
    axes.plot(at, steps.mean(dim=0).tolist(), color=colour, lw=2)
    axes.axhline(1 / steps.shape[1], color=colour, lw=1.5, ls="--")
    axes.set_ylim(bottom=0)


def _outside(axes: Axes, paths: Paths, colour: str) -> None:
    shares = outside(paths.starts)
    axes.plot(_angles(len(shares)), (100 * shares).tolist(), color=colour, lw=2)
    axes.set_ylim(bottom=0)


def _spread(axes: Axes, paths: Paths, colour: str) -> None:
    own, convex = spread(paths.starts), spread(paths.convex)
    axes.plot(_angles(len(own)), own.tolist(), color=colour, lw=2)
    axes.plot(_angles(len(own)), convex.tolist(), color=colour, lw=1.5, ls="--")
    axes.set_ylim(0, 1.1 * own.max().item())


CURVES: dict[str, Curve] = {
    # Each run's f has a zero of its own.
    "f, less that of held-out images": _along("f", less_data=True),
    "distance to the nearest training image": _along("distance"),
    "contrast": _along("contrast"),
    "length of a step, of the ends' distance": _steps,
    "entries of z_ρ outside [-1, 1] (%)": _outside,
    "spread of z_ρ; dashed: convex": _spread,
}
