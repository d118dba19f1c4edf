"""The picture of figure "steps": chains on their way, and their numbers as curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.images import sample_grid
from .measured import describe
from .step_sweep import Sweep, even_stops

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ("-", "--", ":")
MOST_RUNS = len(COLOURS) * len(LINES)

# All in inches.
WIDTH = 11.5
SIDE, TOP = 0.3, 0.85
LARGEST = 0.95
HEADER, AFTER_STRIP = 0.55, 0.15
PANEL_HEIGHT, PANEL_LEFT, PANEL_BELOW = 2.3, 0.85, 0.75
PANELS, MOST_PANELS = 3, 6
LEGEND_LINE, LEGEND_COLUMNS = 0.24, 2


def draw(sweeps: Sequence[Sweep]) -> Figure:
    """A strip of images for each run, K1 marked, and curves of all runs below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shown = columns([own.trained[0] for own in sweeps])
    cell = min(LARGEST, (WIDTH - 2 * SIDE) / len(shown))
    strips = [HEADER + cell * len(own.images) + AFTER_STRIP for own in sweeps]
    coloured = any(own.run.data.sample_shape[0] > 1 for own in sweeps)
    panels = [name for name in CURVES if coloured or name != COLOUR][:MOST_PANELS]
    rows = -(-len(panels) // PANELS)
    legend = 0.1 + LEGEND_LINE * -(-len(sweeps) // LEGEND_COLUMNS)
    below = TOP + sum(strips) + 0.65
    canvas = Canvas(WIDTH, below + rows * (PANEL_HEIGHT + PANEL_BELOW) - 0.25 + legend)
    canvas.write(WIDTH / 2, 0.25, "Sampling with K2 steps what was trained with K1", fontsize=13)
    # One seed gives runs the same starts and noise where their images have one shape.
    alike = len(sweeps) > 1 and len({own.run.data.sample_shape for own in sweeps}) == 1
    canvas.write(
        WIDTH / 2,
        0.53,
        "each row is one chain on its way, cut to [-1, 1] for display"
        + ("; the same starts and noise for every run" if alike else ""),
        fontsize=9,
        color=DARK,
    )
    y = TOP
    for i, (own, height) in enumerate(zip(sweeps, strips, strict=True)):
        _draw_strip(canvas, y, own, shown, cell, _colour(i))
        y += height
    count = len(sweeps[0].chains[0].each["f"])
    canvas.write(
        WIDTH / 2,
        below - 0.4,
        f"means over {count:,} chains; upright: K1; level and dotted: data with the noise of "
        "training",
        fontsize=9,
        color=DARK,
    )
    wide = WIDTH / PANELS
    for i, name in enumerate(panels):
        axes = canvas.axes(
            i % PANELS * wide + PANEL_LEFT,
            below + i // PANELS * (PANEL_HEIGHT + PANEL_BELOW),
            wide - PANEL_LEFT - 0.2,
            PANEL_HEIGHT,
        )
        CURVES[name](axes, sweeps)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("K2", labelpad=1)
        axes.tick_params(labelsize=8)
        axes.yaxis.set_major_formatter("{x:.4g}")
        axes.set_xlim(0, sweeps[0].stops[-1])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    canvas.figure.legend(
        handles=_legend(sweeps), loc="lower center", ncols=LEGEND_COLUMNS, frameon=False, fontsize=9
    )
    return canvas.figure


def columns(trained: Sequence[int]) -> tuple[int, ...]:
    """The K2 whose images are shown: the even ones and every run's K1.

    Args:
        trained: K1 of each run.
    """
    return tuple(sorted({*even_stops(trained), *trained}))


def _draw_strip(
    canvas: Canvas, y: float, own: Sweep, shown: Sequence[int], cell: float, colour: str
) -> None:
    import torch
    from matplotlib.patches import Rectangle

    wide = cell * len(shown)
    left = (WIDTH - wide) / 2
    canvas.write(left, y + 0.12, describe(own.run), fontsize=10, ha="left", color=colour)
    low, high = own.trained
    for i, steps in enumerate(shown):
        trained = low <= steps <= high
        canvas.write(
            left + (i + 0.5) * cell,
            y + HEADER - 0.13,
            f"{'K1 = ' if steps == low else ''}{steps}",
            fontsize=9,
            color=colour if trained else DARK,
            weight="bold" if trained else "normal",
        )
    places = [own.stops.index(steps) for steps in shown]
    images = own.images[:, places]
    rows = len(images)
    axes = canvas.axes(left, y + HEADER, wide, cell * rows)
    axes.set_axis_off()
    zoom = max(1, 64 // images.shape[-1])
    picture = sample_grid(torch.flatten(images, 0, 1), columns=len(shown), zoom=zoom)
    axes.imshow(picture, interpolation="nearest", aspect="auto")
    tile = picture.shape[1] / len(shown)
    at = [i for i, steps in enumerate(shown) if low <= steps <= high]
    frame = Rectangle(
        (at[0] * tile - 0.5, -0.5),
        len(at) * tile,
        picture.shape[0],
        fill=False,
        edgecolor=colour,
        lw=2,
        clip_on=False,
    )
    axes.add_patch(frame)


def _means(axes: Axes, sweeps: Sequence[Sweep], values: Callable[[Sweep, int], float]) -> None:
    for i, own in enumerate(sweeps):
        style: dict[str, Any] = {"color": _colour(i), "ls": LINES[i // len(COLOURS)]}
        axes.plot(own.stops, [values(own, steps) for steps in own.stops], lw=1.4, **style)
        low, high = own.trained
        if low == high:
            axes.axvline(low, lw=0.8, alpha=0.6, **style)
        else:
            axes.axvspan(low, high, color=_colour(i), alpha=0.12, lw=0)


def _relative(name: str) -> Callable[[Axes, Sequence[Sweep]], None]:
    def curve(axes: Axes, sweeps: Sequence[Sweep]) -> None:
        _means(axes, sweeps, lambda own, steps: own.over_data(steps, name))
        axes.axhline(1, color=DARK, lw=1.2, ls=":")

    return curve


def _absolute(name: str) -> Callable[[Axes, Sequence[Sweep]], None]:
    def curve(axes: Axes, sweeps: Sequence[Sweep]) -> None:
        _means(axes, sweeps, lambda own, steps: own.at(steps).mean(name))
        for i, own in enumerate(sweeps):
            axes.axhline(own.data.mean(name), color=_colour(i), lw=1.2, ls=":")

    return curve


def _gap(axes: Axes, sweeps: Sequence[Sweep]) -> None:
    _means(axes, sweeps, lambda own, steps: own.gap(steps))
    axes.axhline(0, color=DARK, lw=1.2, ls=":")


COLOUR = "colour, of the data's"
CURVES: dict[str, Callable[[Axes, Sequence[Sweep]], None]] = {
    "contrast, of the data's": _relative("contrast"),
    COLOUR: _relative("colour"),
    "share shown as black or white": _absolute("ends"),
    "mean excess beyond [-1, 1]": _absolute("excess"),
    "mean f(data) − mean f(x⁻)": _gap,
    "distance to data, of that of held-out": _relative("distance"),
    "mean length of ∇f": _absolute("slope"),
}
"""The panels, the more telling first."""


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _legend(sweeps: Sequence[Sweep]) -> list[object]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=_colour(i), ls=LINES[i // len(COLOURS)], lw=2, label=own.run.name)
        for i, own in enumerate(sweeps)
    ]
