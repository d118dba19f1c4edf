"""The figures in two dimensions: images of densities, in the paper's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...plots.canvas import DARK, Canvas
from .panels import Panel, Picture
from .specs import FigureSpec
from .words import NUMBERS, column_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# All in inches.
PANEL = 1.2
IN_PAIR = 0.06
BETWEEN_PAIRS = 0.22
CAPTION = 0.34
BETWEEN_BANDS = 0.14
LEFT = 0.74
RIGHT = 0.14
TOP = 0.98
BOTTOM = 0.5

ROWS = ("density", "log density")
LEARNED, SAMPLED = r"$p_\theta$", r"SGLD$(p_\theta)$"
GREY = "#E6E6E6"
FOOTNOTE = (
    "Densities of seed 0, each on its own colour scale; log density is log(density + 1e-10).\n"
    + NUMBERS
)


@dataclass(frozen=True)
class Layout:
    """Where the panels of a figure lie, in inches from its top left corner.

    Attributes:
        pairs: pairs of columns beside the truth.
        bands: pairs of rows.
    """

    pairs: int
    bands: int

    @property
    def width(self) -> float:
        """Of the whole picture."""
        return self.left(2 * self.pairs) + PANEL + RIGHT

    @property
    def height(self) -> float:
        """Of the whole picture."""
        return self.top(self.bands - 1, 1) + PANEL + CAPTION + BOTTOM

    def left(self, column: int) -> float:
        """Left side of a column; 0 is the truth, 2 k + 1 and 2 k + 2 are pair k."""
        gaps = (column + 1) // 2 * BETWEEN_PAIRS + column // 2 * IN_PAIR
        return LEFT + column * PANEL + gaps

    def top(self, band: int, row: int) -> float:
        """Upper side of a row: 0 is a band's density, 1 its log density."""
        return TOP + (2 * band + row) * (PANEL + CAPTION) + band * BETWEEN_BANDS


def draw_images(spec: FigureSpec, picture: Picture) -> Figure:
    """One picture of densities on (n, n) grids; y grows downward, as in the paper.

    Args:
        spec: the figure.
        picture: one of its pictures.

    Raises:
        ImportError: matplotlib is not installed.
    """
    layout = Layout(pairs=len(picture.bands[0].pairs), bands=len(picture.bands))
    canvas = Canvas(layout.width, layout.height)
    left = {"ha": "left", "fontsize": 8, "color": DARK}
    canvas.write(LEFT, 0.22, picture.title, **{**left, "fontsize": 12, "color": "black"})
    canvas.write(LEFT, layout.height - 0.3, FOOTNOTE, **left)
    beside = {"fontsize": 11, "rotation": 90, "linespacing": 1.1}
    _draw_head(canvas, layout, spec)
    for i, band in enumerate(picture.bands):
        middle = (layout.top(i, 0) + layout.top(i, 1) + PANEL) / 2
        canvas.write(0.24, middle, band.label, fontweight="bold", **beside)
        panels = [band.truth, *(panel for pair in band.pairs for panel in pair)]
        for row, name in enumerate(ROWS):
            top = layout.top(i, row)
            canvas.write(0.56, top + PANEL / 2, name, fontsize=9, rotation=90)
            for column, panel in enumerate(panels):
                _draw_panel(canvas, layout.left(column), top, panel, row)
    return canvas.figure


def _draw_head(canvas: Canvas, layout: Layout, spec: FigureSpec) -> None:
    canvas.write(layout.left(0) + PANEL / 2, TOP - 0.14, "truth", fontsize=10)
    for k, column in enumerate(spec.columns):
        start, end = layout.left(2 * k + 1), layout.left(2 * k + 2) + PANEL
        canvas.write((start + end) / 2, TOP - 0.44, column_title(spec.across, column), fontsize=12)
        canvas.rule(start, end, TOP - 0.3)
        for side, name in enumerate((LEARNED, SAMPLED)):
            canvas.write(layout.left(2 * k + 1 + side) + PANEL / 2, TOP - 0.14, name, fontsize=10)


def _draw_panel(canvas: Canvas, left: float, top: float, panel: Panel, row: int) -> None:
    axes = canvas.axes(left, top, PANEL, PANEL)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_linewidth(0.4)
    image = panel.log_density if row else panel.density
    if image is None:
        axes.set_facecolor(GREY)
        middle = (left + PANEL / 2, top + PANEL / 2)
        canvas.write(*middle, panel.instead, fontsize=9, color=DARK)
    else:
        # Each panel has its own scale, as in the paper: beside a density that is far too sharp all
        # others would be black.
        axes.imshow(image, cmap="viridis", origin="upper", aspect="auto")
    below = {"va": "top", "fontsize": 7.5, "linespacing": 1.1}
    canvas.write(left + PANEL / 2, top + PANEL + 0.04, "\n".join(panel.captions[row]), **below)
