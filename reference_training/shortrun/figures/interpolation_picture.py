"""The picture of figure "interpolation": images along paths, and their numbers as curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.images import sample_grid
from .measured import describe
from .paths import POINTS, Paths, course, outside, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RUNS = len(COLOURS)
PAIRS = 4
"""Whose images are shown."""
EVERY = 2
"""Of the points of a path, so many apart are shown."""

# All in inches.
WIDTH = 11.5
LABEL, RIGHT, TOP = 1.15, 0.3, 0.85
HEADER, BETWEEN, AFTER = 0.5, 0.06, 0.2
PANEL_HEIGHT, PANEL_LEFT, PANEL_BELOW = 2.2, 0.85, 0.75
PANELS = 3
LEGEND_LINE, LEGEND_COLUMNS = 0.24, 2
TICKS = (0, 30, 60, 90)


def draw(found: Sequence[Paths]) -> Figure:
    """Rows of images for each run, with the pixel blend of its first pair, and curves below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    columns = len(range(0, POINTS, EVERY))
    cell = (WIDTH - LABEL - RIGHT) / columns
    heights = [
        HEADER + (cell + BETWEEN) * (min(PAIRS, len(paths.images)) + 1) + AFTER for paths in found
    ]
    below = TOP + sum(heights) + 0.65
    rows = -(-len(CURVES) // PANELS)
    legend = 0.1 + LEGEND_LINE * -(-len(found) // LEGEND_COLUMNS)
    canvas = Canvas(WIDTH, below + rows * (PANEL_HEIGHT + PANEL_BELOW) - 0.25 + legend)
    canvas.write(
        WIDTH / 2, 0.25, "Between two samples, through the noise they come from", fontsize=13
    )
    canvas.write(
        WIDTH / 2,
        0.53,
        "x = M(ρ z1 + √(1 − ρ²) z2), the steps of training without noise; ρ at even angles; cut to "
        "[-1, 1] for display",
        fontsize=9,
        color=DARK,
    )
    y = TOP
    for i, (paths, height) in enumerate(zip(found, heights, strict=True)):
        _draw_rows(canvas, y, paths, cell, COLOURS[i])
        y += height
    count = len(found[0].images)
    canvas.write(
        WIDTH / 2,
        below - 0.4,
        f"means over {count:,} pairs in bold, each pair thin; dashed: pixel blends; dotted: "
        "held-out images",
        fontsize=9,
        color=DARK,
    )
    wide = WIDTH / PANELS
    for i, (name, curve) in enumerate(CURVES.items()):
        axes = canvas.axes(
            i % PANELS * wide + PANEL_LEFT,
            below + i // PANELS * (PANEL_HEIGHT + PANEL_BELOW),
            wide - PANEL_LEFT - 0.2,
            PANEL_HEIGHT,
        )
        for paths, colour in zip(found, COLOURS, strict=False):
            curve(axes, paths, colour)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("angle (degrees), 0 is z2 and 90 is z1", fontsize=8, labelpad=1)
        axes.set_xticks(TICKS)
        axes.set_xlim(0, 90)
        axes.tick_params(labelsize=8)
        axes.yaxis.set_major_formatter("{x:.4g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    canvas.figure.legend(
        handles=_legend(found), loc="lower center", ncols=LEGEND_COLUMNS, frameon=False, fontsize=9
    )
    return canvas.figure


def _draw_rows(canvas: Canvas, y: float, paths: Paths, cell: float, colour: str) -> None:
    places = range(0, POINTS, EVERY)
    canvas.write(LABEL, y + 0.12, describe(paths.run), fontsize=10, ha="left", color=colour)
    for i, place in enumerate(places):
        label = f"{'ρ = ' if i == 0 else ''}{paths.rho[place]:.2f}"
        canvas.write(LABEL + (i + 0.5) * cell, y + HEADER - 0.11, label, fontsize=9, color=DARK)
    pairs = [(f"pair {i + 1}", images) for i, images in enumerate(paths.images[:PAIRS])]
    # Under the pair whose ends it has.
    rows = [pairs[0], ("pixel blend\nof pair 1", paths.blends[0]), *pairs[1:]]
    y += HEADER
    zoom = max(1, 64 // paths.images.shape[-1])
    for label, images in rows:
        canvas.write(LABEL - 0.12, y + cell / 2, label, fontsize=9, ha="right", color=DARK)
        axes = canvas.axes(LABEL, y, cell * len(places), cell)
        axes.set_axis_off()
        axes.imshow(
            sample_grid(images[::EVERY], columns=len(places), zoom=zoom),
            interpolation="nearest",
            aspect="auto",
        )
        y += cell + BETWEEN


def _angles(count: int) -> list[float]:
    return [90 * i / (count - 1) for i in range(count)]


def _along(name: str, *, less_data: bool = False) -> Callable[[Axes, Paths, str], None]:
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


CURVES: dict[str, Callable[[Axes, Paths, str], None]] = {
    # Each run's f has a zero of its own.
    "f, less that of held-out images": _along("f", less_data=True),
    "distance to the nearest training image": _along("distance"),
    "contrast": _along("contrast"),
    "length of a step, of the ends' distance": _steps,
    "entries of z_ρ outside [-1, 1] (%)": _outside,
    "spread of z_ρ; dashed: convex": _spread,
}


def _legend(found: Sequence[Paths]) -> list[object]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=colour, lw=2, label=paths.run.name)
        for paths, colour in zip(found, COLOURS, strict=False)
    ]
