"""The picture of figure "long-run": chains on their long way, and their numbers as curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.images import sample_grid
from .long_chains import Chains, LongRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RUNS = len(COLOURS)
LINES = {"noise": "-", "data": "--"}

# All in inches.
WIDTH = 11.5
SIDE, BETWEEN, TOP = 0.3, 0.35, 0.8
LARGEST = 0.8
HEADER, LOST_LINE, AFTER_STRIP = 0.5, 0.18, 0.2
PANEL_HEIGHT, PANEL_LEFT, PANEL_BELOW = 2.2, 0.85, 0.8
PANELS = 3
LEGEND_LINE = 0.24
TALLEST = 100.0
"""Up to here scales are linear; and beyond it, and beyond the size at the start, they are cut."""


def draw(found: Sequence[LongRun]) -> Figure:
    """For each run its chains from noise and, beside them, from data; curves of all runs below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    columns = max(len(own.chains[0].stops) for own in found)
    cell = min(LARGEST, (WIDTH - 2 * SIDE - BETWEEN) / 2 / columns)
    headers = [HEADER + LOST_LINE * _loses(own) for own in found]
    strips = [
        header + cell * len(own.chains[0].images) + AFTER_STRIP
        for header, own in zip(headers, found, strict=True)
    ]
    rows = -(-len(CURVES) // PANELS)
    below = TOP + sum(strips) + 0.55
    legend = 0.15 + LEGEND_LINE * len(found)
    canvas = Canvas(WIDTH, below + rows * (PANEL_HEIGHT + PANEL_BELOW) - 0.3 + legend)
    canvas.write(WIDTH / 2, 0.25, "Chains that go on for long after K steps", fontsize=13)
    canvas.write(
        WIDTH / 2,
        0.53,
        "each row is one chain on its way, cut to [-1, 1] for display, red where it is not finite; "
        "numbers of steps above, K framed",
        fontsize=9,
        color=DARK,
    )
    y = TOP
    for i, own in enumerate(found):
        for chains, left in zip(own.chains, (SIDE, (WIDTH + BETWEEN) / 2), strict=True):
            canvas.write(left, y + 0.12, _title(own, chains), **_title_style(i))
            _draw_strip(canvas, left, y + headers[i], own, chains, cell, COLOURS[i])
        y += strips[i]
    canvas.write(
        WIDTH / 2,
        below - 0.36,
        "means over the chains that are still finite; solid: from noise; dashed: from held-out "
        "data; upright: K; level and dotted: data with the noise of training",
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
        curve(axes, found)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("steps", labelpad=1)
        least = min(own.trained for own in found)
        axes.set_xscale("symlog", linthresh=least, linscale=0.5)
        # A power of ten in the linear part would lie on the 0.
        powers = (10**k for k in range(len(str(found[0].last))))
        axes.set_xticks([0, *(power for power in powers if power >= least)])
        axes.set_xlim(0, found[0].last)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    canvas.figure.legend(
        handles=_legend(found), loc="lower center", ncols=1, frameon=False, fontsize=9
    )
    return canvas.figure


def _loses(own: LongRun) -> bool:
    return any(chains.lost() is not None for chains in own.chains)


def _title(own: LongRun, chains: Chains) -> str:
    return f"{own.run.name}: from {'noise' if chains.start == 'noise' else 'held-out data'}"


def _title_style(place: int) -> dict[str, Any]:
    return {"fontsize": 10, "ha": "left", "color": COLOURS[place]}


def _draw_strip(
    canvas: Canvas, left: float, top: float, own: LongRun, chains: Chains, cell: float, colour: str
) -> None:
    import torch
    from matplotlib.patches import Rectangle

    columns, rows = len(chains.stops), len(chains.images)
    for i, stop in enumerate(chains.stops):
        lost = int((~chains.finite(stop)).sum())
        canvas.write(
            left + (i + 0.5) * cell,
            top - 0.06,
            short(stop) + (f"\n{lost} lost" if lost else ""),
            fontsize=8,
            va="bottom",
            color=colour if stop == own.trained else DARK,
            weight="bold" if stop == own.trained else "normal",
        )
    axes = canvas.axes(left, top, cell * columns, cell * rows)
    axes.set_axis_off()
    zoom = max(1, 64 // chains.images.shape[-1])
    picture = sample_grid(torch.flatten(chains.images, 0, 1), columns=columns, zoom=zoom)
    axes.imshow(picture, interpolation="nearest", aspect="auto")
    tile = picture.shape[1] / columns
    frame = Rectangle(
        (chains.stops.index(own.trained) * tile - 0.5, -0.5),
        tile,
        picture.shape[0],
        fill=False,
        edgecolor=colour,
        lw=2,
        clip_on=False,
    )
    axes.add_patch(frame)


def short(steps: int) -> str:
    """A number of steps in few letters: 200, 5k, 2.5k, 1M."""
    for unit, size in (("M", 10**6), ("k", 1000)):
        if steps >= size:
            return f"{steps / size:g}{unit}"
    return str(steps)


Values = Callable[[LongRun, Chains, int], float]


def _lines(axes: Axes, found: Sequence[LongRun], values: Values) -> None:
    early, every = [TALLEST], [0.0]
    for i, own in enumerate(found):
        for chains in own.chains:
            course = [values(own, chains, stop) for stop in chains.stops]
            shown = [value if math.isfinite(value) else math.nan for value in course]
            style: dict[str, Any] = {"color": COLOURS[i], "ls": LINES[chains.start]}
            axes.plot(chains.stops, shown, lw=1.4, marker=".", **style)
            known = {s: abs(v) for s, v in zip(chains.stops, shown, strict=True) if v == v}
            every += known.values()
            early += [size for stop, size in known.items() if stop == 0]
        axes.axvline(own.trained, lw=0.8, alpha=0.6, color=COLOURS[i])
    if max(every) > TALLEST:
        axes.set_yscale("symlog", linthresh=1)
        # What diverges leaves the panel, and the other curves stay readable.
        low, high = axes.get_ylim()
        most = 2 * max(early)
        axes.set_ylim(max(low, -most), min(high, most))


def _relative(name: str) -> Callable[[Axes, Sequence[LongRun]], None]:
    def curve(axes: Axes, found: Sequence[LongRun]) -> None:
        _lines(axes, found, lambda own, chains, stop: own.of_data(name, chains, stop))
        axes.axhline(1, color=DARK, lw=1.2, ls=":")

    return curve


def _moved(axes: Axes, found: Sequence[LongRun]) -> None:
    _lines(axes, found, lambda _, chains, stop: chains.mean("moved", stop))


def _off(axes: Axes, found: Sequence[LongRun]) -> None:
    _lines(axes, found, lambda own, chains, stop: own.shift(chains, stop))
    axes.axhline(0, color=DARK, lw=1.2, ls=":")


def _variety(axes: Axes, found: Sequence[LongRun]) -> None:
    _lines(axes, found, lambda own, chains, stop: own.variety(chains, stop))
    axes.axhline(1, color=DARK, lw=1.2, ls=":")


def _pull(axes: Axes, found: Sequence[LongRun]) -> None:
    _lines(axes, found, lambda own, chains, stop: own.pull(chains.mean("slope", stop)))
    for i, own in enumerate(found):
        axes.axhline(own.pull(own.data.mean("slope")), color=COLOURS[i], lw=1.2, ls=":")


CURVES: dict[str, Callable[[Axes, Sequence[LongRun]], None]] = {
    "mean f, off the data's, in its std": _off,
    "contrast, of the data's": _relative("contrast"),
    "variety of chains, of the data's": _variety,
    "distance to data, of held-out's": _relative("distance"),
    "rms distance to the chain's start": _moved,
    "drift of a step over its noise": _pull,
}
"""The panels."""


def _legend(found: Sequence[LongRun]) -> list[object]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=COLOURS[i], lw=2, label=f"{own.run.name}, {own.training}")
        for i, own in enumerate(found)
    ]
