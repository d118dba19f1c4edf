"""The picture of figure "reconstruction": rows of images, and errors as curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.images import sample_grid
from .measured import describe
from .reconstructed import (
    HELD_OUT,
    NOISE,
    PERMUTED,
    STAGES,
    TRAINED,
    UNTRAINED,
    Reconstructed,
    Reconstruction,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 10
"""Images of a kind, at most."""

LEAST = 1e-5
"""Where the axes of errors end, as a share of the variance: what is left of an image that a free
descent has reached is rounding."""

# All in inches.
WIDTH = 12.0
LABEL, CELL, TOP = 2.05, 0.56, 0.85
HEADER, BETWEEN, APART, AFTER = 0.35, 0.05, 0.18, 0.45
PANEL_LEFT, PANEL_WIDTH, PANEL_HEIGHT, PANEL_BELOW = 8.55, 3.2, 2.45, 0.75

Row = tuple[str, Tensor]
"""A label, and images."""

CURVES = (
    (TRAINED, HELD_OUT, True, COLOURS[0], "-"),
    (TRAINED, HELD_OUT, False, COLOURS[0], "--"),
    (UNTRAINED, HELD_OUT, True, COLOURS[1], "-"),
    (UNTRAINED, HELD_OUT, False, COLOURS[1], "--"),
    (TRAINED, PERMUTED, True, COLOURS[2], "-"),
    (TRAINED, PERMUTED, False, COLOURS[2], "--"),
    (TRAINED, NOISE, True, COLOURS[3], "-"),
    (TRAINED, NOISE, False, COLOURS[3], "--"),
)
"""Network, images, whether in the cube, and how they are drawn."""


def draw(found: Sequence[Reconstructed]) -> Figure:
    """For each run rows of images, and beside them errors over the iterations and components.

    Raises:
        ImportError: matplotlib is not installed.
    """
    blocks = [_blocks(own) for own in found]
    heights = [HEADER + _height(own) + AFTER for own in blocks]
    canvas = Canvas(WIDTH, TOP + sum(heights))
    canvas.write(
        WIDTH / 2, 0.25, "Held-out images, and the nearest that a chain ends at", fontsize=13
    )
    canvas.write(
        WIDTH / 2,
        0.53,
        "x = M(z), the steps of training without noise; z by descent on |x − M(z)|² after t "
        "iterations; cut to [-1, 1] for display",
        fontsize=9,
        color=DARK,
    )
    y = TOP
    for own, rows, height in zip(found, blocks, heights, strict=True):
        canvas.write(0.3, y + 0.1, describe(own.run), fontsize=10, ha="left")
        _draw_rows(canvas, y + HEADER, rows)
        upper, lower = (
            canvas.axes(
                PANEL_LEFT,
                y + HEADER + i * (PANEL_HEIGHT + PANEL_BELOW),
                PANEL_WIDTH,
                PANEL_HEIGHT,
            )
            for i in range(2)
        )
        _draw_courses(upper, own)
        _draw_components(lower, own)
        y += height
    return canvas.figure


def _blocks(own: Reconstructed) -> list[list[Row]]:
    """The rows of a run, in blocks that lie apart."""
    cube, free = (own.one(TRAINED, HELD_OUT, inside=inside) for inside in (True, False))
    fresh = own.one(UNTRAINED, HELD_OUT, inside=True)
    stages = [
        (f"t = {stage}{', z in the cube' if stage else ''}", images)
        for stage, images in zip(STAGES, cube.inverse.stages, strict=True)
    ]
    first = [
        (HELD_OUT, cube.target),
        *stages,
        (f"t = {STAGES[-1]}, z free", free.inverse.x),
        ("untrained, in the cube", fresh.inverse.x),
        ("nearest training image", own.neighbours),
    ]
    controls = [own.one(TRAINED, name, inside=True) for name in (PERMUTED, NOISE)]
    return [
        first,
        *([(one.images, one.target), ("z in the cube", one.inverse.x)] for one in controls),
    ]


def _height(blocks: Sequence[Sequence[Row]]) -> float:
    rows = sum(map(len, blocks)) * (CELL + BETWEEN) + (len(blocks) - 1) * APART
    return max(rows, 2 * PANEL_HEIGHT + PANEL_BELOW + 0.2)


def _draw_rows(canvas: Canvas, y: float, blocks: Sequence[Sequence[Row]]) -> None:
    for block in blocks:
        for label, images in block:
            shown = images[:SHOWN]
            canvas.write(LABEL - 0.12, y + CELL / 2, label, fontsize=9, ha="right", color=DARK)
            axes = canvas.axes(LABEL, y, CELL * len(shown), CELL)
            axes.set_axis_off()
            zoom = max(1, 64 // images.shape[-1])
            axes.imshow(
                sample_grid(shown, columns=len(shown), zoom=zoom),
                interpolation="nearest",
                aspect="auto",
            )
            y += CELL + BETWEEN
        y += APART


def _draw_courses(axes: Axes, own: Reconstructed) -> None:
    for network, images, inside, colour, style in CURVES:
        one = own.one(network, images, inside=inside)
        label = (images if network == TRAINED else "untrained") if inside else None
        axes.plot(_shares(one), color=colour, ls=style, lw=1.4, label=label)
    _lines(axes, own)
    axes.set_yscale("log")
    axes.set_title("error, of variance; dashed: z free", fontsize=10)
    axes.set_xlabel("iteration t", fontsize=8, labelpad=1)
    axes.set_xlim(0, STAGES[-1])
    axes.set_ylim(bottom=LEAST)
    _finish(axes, "lower right")


def _shares(one: Reconstruction) -> list[float]:
    shares: list[float] = (one.inverse.course.double().mean(1) / one.variance).tolist()
    return shares


def _lines(axes: Axes, own: Reconstructed) -> None:
    variance = own.one(TRAINED, HELD_OUT, inside=True).variance
    near = own.neighbour_error.mean().item() / variance
    axes.axhline(near, color=DARK, lw=1, ls=":", label="nearest training image")


def _draw_components(axes: Axes, own: Reconstructed) -> None:
    one = own.one(TRAINED, HELD_OUT, inside=True)
    shares = (own.principal.mean(1) / one.variance).tolist()
    shown = [share for share in shares if share > LEAST]
    axes.plot(shown, color=DARK, lw=1.4, label="principal components")
    axes.axhline(one.share, color=COLOURS[0], lw=1.4, label="z in the cube")
    _lines(axes, own)
    axes.set_yscale("log")
    axes.set_title("error, of variance, of held-out images", fontsize=10)
    axes.set_xlabel(
        f"principal components, of {own.neighbours[0].numel():,}", fontsize=8, labelpad=1
    )
    axes.set_xlim(left=0)
    _finish(axes, "lower left")


def _finish(axes: Axes, place: Literal["lower left", "lower right"]) -> None:
    axes.legend(fontsize=7, frameon=False, loc=place)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
