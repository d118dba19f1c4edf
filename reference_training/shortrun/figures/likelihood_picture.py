"""The picture of figure "likelihood": images, M(z), the bits of each, and log|det| by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.images import sample_grid
from .densities import GAUSSIAN, NOISY, OWN, PIXELS, STORED, UNIFORM, Densities, Flow
from .measured import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (*COLOURS, "#8C6D31")
"""Of the flows, in their order; the last is brown."""
SHOWN = 8
"""Images of a kind, at most."""
MARKS = ((PIXELS, "^"), (GAUSSIAN, "D"))
"""Fitted densities, and how their means are drawn."""

# All in inches.
WIDTH = 13.7
LABEL, CELL, BETWEEN, TOP = 1.75, 0.46, 0.05, 0.85
HEADER, PANEL_HEIGHT, BELOW = 0.5, 3.05, 0.95
STRIP_LEFT, STRIP_WIDTH = 6.6, 3.5
COURSE_LEFT, COURSE_WIDTH = 10.7, 2.75


def draw(found: Sequence[Densities]) -> Figure:
    """For each run images beside M(z), bits per dimension, and how log|det| came about.

    Raises:
        ImportError: matplotlib is not installed.
    """
    height = HEADER + PANEL_HEIGHT + BELOW
    canvas = Canvas(WIDTH, TOP + len(found) * height)
    canvas.write(
        WIDTH / 2,
        0.25,
        "Held-out images, and their density by the short run as a flow",
        fontsize=13,
    )
    canvas.write(
        WIDTH / 2,
        0.53,
        "p(M(z)) = p_0(z) / |det dM/dz|: density where the flow arrives, which is not at the image "
        "where M(z) misses it; images are cut to [-1, 1] for display",
        fontsize=9,
        color=DARK,
    )
    for i, own in enumerate(found):
        y = TOP + i * height
        canvas.write(0.3, y + 0.1, describe(own.run), fontsize=10, ha="left")
        _draw_images(canvas, y + HEADER, own)
        _draw_bits(canvas.axes(STRIP_LEFT, y + HEADER, STRIP_WIDTH, PANEL_HEIGHT), own)
        _draw_course(canvas.axes(COURSE_LEFT, y + HEADER, COURSE_WIDTH, PANEL_HEIGHT), own)
    return canvas.figure


def _label(one: Flow) -> str:
    if one.images == OWN:
        return f"{OWN},\nz drawn"
    return f"{one.images},\nz {'in the cube' if one.inside else 'free'}"


def _draw_images(canvas: Canvas, y: float, own: Densities) -> None:
    free, cube = own.one(STORED, inside=False), own.one(STORED)
    rows = [("held-out images", cube.target), ("M(z), z free", free.x)]
    rows += [("M(z), z in the cube", cube.x)]
    if own.noise is not None:
        noisy = own.one(NOISY)
        rows += [("with training's noise", noisy.target), ("M(z), z in the cube", noisy.x)]
    rows.append(("M(z), z drawn", own.one(OWN).x))
    for label, images in rows:
        shown = images[:SHOWN].float()
        canvas.write(LABEL - 0.1, y + CELL / 2, label, fontsize=8.5, ha="right", color=DARK)
        axes = canvas.axes(LABEL, y, CELL * len(shown), CELL)
        axes.set_axis_off()
        axes.imshow(
            sample_grid(shown, columns=len(shown), zoom=max(1, 64 // shown.shape[-1])),
            interpolation="nearest",
            aspect="auto",
        )
        y += CELL + BETWEEN


def _draw_bits(axes: Axes, own: Densities) -> None:
    for row, (one, colour) in enumerate(zip(own.flows, PALETTE, strict=False)):
        finite = one.bits.isfinite()
        for within, face in ((True, colour), (False, "white")):
            chosen = one.bits[finite & (one.within == within)].tolist()
            # Beside one another, always the same way: they would lie on one another.
            places = [row + 0.1 * (i % 5 - 2) for i in range(len(chosen))]
            axes.scatter(chosen, places, s=14, facecolors=face, edgecolors=colour, linewidths=0.8)
        for name, marker in MARKS:
            if one.images in own.fitted.get(name, {}):
                mean = own.fitted[name][one.images].mean().item()
                label = f"{name}, mean" if row == 0 else None
                axes.plot(mean, row, marker, color=DARK, ms=6, mfc="none", ls="none", label=label)
        if one.images == NOISY and own.noise is not None:
            ends = [row - 0.4, row + 0.4]
            axes.plot([own.noise] * 2, ends, color=DARK, lw=1.6, label="entropy of the noise")
    uniform = own.fitted[UNIFORM][STORED][0].item()
    axes.axvline(uniform, color=DARK, lw=1, ls=":", label=UNIFORM)
    for face, label in ((DARK, "an image"), ("white", "z outside: likelihood 0")):
        axes.scatter([], [], s=14, facecolors=face, edgecolors=DARK, linewidths=0.8, label=label)
    axes.set_yticks(range(len(own.flows)), [_label(one) for one in own.flows], fontsize=7.5)
    axes.set_ylim(len(own.flows) - 0.4, -0.6)
    axes.set_title("bits per dimension at M(z)", fontsize=10)
    place = (0.4, -0.08)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=place)
    _finish(axes)
    for tick, colour in zip(axes.get_yticklabels(), PALETTE, strict=False):
        tick.set_color(colour)


def _draw_course(axes: Axes, own: Densities) -> None:
    for one, colour in zip(own.flows, PALETTE, strict=False):
        axes.plot(one.course.tolist(), color=colour, lw=0.4, alpha=0.35)
        axes.plot(one.course.mean(1).tolist(), color=colour, lw=1.6)
    axes.axhline(0, color=DARK, lw=0.6)
    axes.set_xlim(0, len(own.flows[0].course) - 1)
    axes.set_title("log2|det| / D of the first k steps", fontsize=10)
    axes.set_xlabel("k; colours as on the left", fontsize=8)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.tick_params(labelsize=7.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
