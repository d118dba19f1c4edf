"""The figures in one dimension: densities as lines, for every β a pair of axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...plots.canvas import COLOURS, DARK, Canvas, unframed
from ...plots.numbers import number
from .panels import Band, Panel, Picture
from .specs import FigureSpec
from .words import NUMBERS, column_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All in inches.
WIDTH, HEIGHT = 2.5, 1.9
BETWEEN, CAPTION = 0.45, 0.72
LEFT, RIGHT = 0.75, 0.15
TOP, BOTTOM = 1.0, 0.5

ROWS = ("density", "log density")
LABELS = ("truth", r"$p_\theta$", r"SGLD$(p_\theta)$")
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "black", "lw": 2.2, "alpha": 0.45},
    {"color": COLOURS[1], "lw": 1.3},
    {"color": COLOURS[0], "lw": 1.3, "ls": "--"},
)
FOOTNOTE = "Densities of seed 0; log density is log(density + 1e-10).\n" + NUMBERS
TALLEST = 2.5
"""Heights of the truth's peak that the axes of densities show: p_θ may be many times as sharp."""


def draw_lines(spec: FigureSpec, picture: Picture) -> Figure:
    """One picture of densities on (n,) grids: truth, p_θ and the estimate of SGLD(p_θ).

    Args:
        spec: the figure.
        picture: its picture, of one band.

    Raises:
        ImportError: matplotlib is not installed.
    """
    (band,) = picture.bands
    pairs = len(band.pairs)
    canvas = Canvas(
        LEFT + pairs * WIDTH + (pairs - 1) * BETWEEN + RIGHT,
        TOP + 2 * (HEIGHT + CAPTION) + BOTTOM,
    )
    left = {"ha": "left", "fontsize": 8, "color": DARK}
    canvas.write(LEFT, 0.22, picture.title, **{**left, "fontsize": 12, "color": "black"})
    canvas.write(LEFT, canvas.height - 0.3, FOOTNOTE, **left)
    for k, (column, pair) in enumerate(zip(spec.columns, band.pairs, strict=True)):
        x = LEFT + k * (WIDTH + BETWEEN)
        canvas.write(x + WIDTH / 2, TOP - 0.2, column_title(spec.across, column), fontsize=12)
        for row, name in enumerate(ROWS):
            y = TOP + row * (HEIGHT + CAPTION)
            axes = canvas.axes(x, y, WIDTH, HEIGHT)
            _draw_curves(axes, band, pair, row)
            if k == 0:
                axes.set_ylabel(name)
                axes.yaxis.set_label_coords(-0.5 / WIDTH, 0.5)
            words = (
                f"{label}: {', '.join(panel.captions[row])}"
                for label, panel in zip(LABELS[1:], pair, strict=True)
            )
            below = {"va": "top", "fontsize": 8, "linespacing": 1.2}
            canvas.write(x + WIDTH / 2, y + HEIGHT + 0.26, "\n".join(words), **below)
    canvas.figure.legend(
        *axes.get_legend_handles_labels(),
        loc="upper left",
        bbox_to_anchor=(LEFT / canvas.width, 1 - 0.36 / canvas.height),
        borderaxespad=0,
        borderpad=0,
        ncols=len(LABELS),
        frameon=False,
    )
    return canvas.figure


def _draw_curves(axes: Axes, band: Band, pair: tuple[Panel, Panel], row: int) -> None:
    for label, panel, style in zip(LABELS, (band.truth, *pair), STYLES, strict=True):
        curve = panel.log_density if row else panel.density
        if curve is None:
            curve = np.full_like(band.axis, np.nan)
        axes.plot(band.axis, curve, label=label, **style)
    assert band.truth.density is not None
    if row == 0:
        top = TALLEST * band.truth.density.max()
        axes.set_ylim(0, top)
        sharp = pair[0].density
        if sharp is not None and sharp.max() > top:
            note = f"$p_\\theta$ reaches {number(float(sharp.max()), 2)}"
            axes.annotate(note, (0.98, 0.96), xycoords="axes fraction", ha="right", va="top")
    axes.set_xlim(band.axis[0], band.axis[-1])
    axes.tick_params(labelsize=8)
    unframed(axes)
