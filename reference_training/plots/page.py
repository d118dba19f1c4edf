"""What the studies' pictures are made of: a heading, rows of images, panels of curves, a legend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .canvas import DARK, Canvas, new_figure, unframed
from .images import sample_grid

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All in inches.
WIDTH = 11.5
SIDE, TOP, BETWEEN = 0.3, 0.85, 0.05
CAPTION, LEGEND_LINE = 0.65, 0.24
PANEL_HEIGHT, PANEL_LEFT, PANEL_BELOW = 2.2, 0.85, 0.78
PANELS = 3

Block = tuple[float, Callable[[Canvas, float], None]]
"""A part of a page: its height, and what draws it from its upper edge on."""


@dataclass(frozen=True)
class Panels:
    """Curves of all runs, below the blocks of a page.

    Attributes:
        caption: what holds for all panels.
        curves: by title, what draws them.
        xlabel: of every panel.
        finish: what is done to every panel after its curves.
        legend: a label and the style of its line, for each run.
        columns: of the legend.
    """

    caption: str
    curves: Mapping[str, Callable[[Axes], None]]
    xlabel: str
    finish: Callable[[Axes], object]
    legend: Sequence[tuple[str, Mapping[str, Any]]]
    columns: int = 2

    @property
    def height(self) -> float:
        """Of all of them with caption and legend."""
        rows, lines = -(-len(self.curves) // PANELS), -(-len(self.legend) // self.columns)
        return CAPTION + rows * (PANEL_HEIGHT + PANEL_BELOW) - 0.15 + LEGEND_LINE * lines

    def draw(self, canvas: Canvas, top: float) -> None:
        """Onto a canvas that ends below them."""
        from matplotlib.lines import Line2D

        canvas.write(canvas.width / 2, top + 0.25, self.caption, fontsize=9, color=DARK)
        beside = PANEL_LEFT + 0.2
        size, apart = (canvas.width / PANELS - beside, PANEL_HEIGHT), (beside, PANEL_BELOW)
        panels = tiles(canvas, len(self.curves), PANELS, PANEL_LEFT, top + CAPTION, size, apart)
        for axes, (title, curve) in zip(panels, self.curves.items(), strict=True):
            curve(axes)
            self.finish(axes)
            plain(axes, title, self.xlabel)
        handles = [Line2D([], [], lw=2, label=label, **style) for label, style in self.legend]
        style: dict[str, Any] = {"ncols": self.columns, "frameon": False, "fontsize": 9}
        canvas.figure.legend(handles=handles, loc="lower center", **style)


def page(
    title: str,
    words: str,
    blocks: Sequence[Block],
    panels: Panels | None = None,
    *,
    width: float = WIDTH,
) -> Figure:
    """A heading of two lines, blocks under each other, and panels of curves."""
    parts = [*blocks, *([] if panels is None else [(panels.height, panels.draw)])]
    canvas, y = Canvas(width, TOP + sum(height for height, _ in parts)), TOP
    heading(canvas, title, words)
    for height, draw in parts:
        draw(canvas, y)
        y += height
    return canvas.figure


def heading(canvas: Canvas, title: str, words: str) -> None:
    """A title, and a line of words under it."""
    canvas.write(canvas.width / 2, 0.25, title, fontsize=13)
    canvas.write(canvas.width / 2, 0.53, words, fontsize=9, color=DARK)


def tiles(
    canvas: Canvas,
    count: int,
    columns: int,
    left: float,
    top: float,
    size: tuple[float, float],
    apart: tuple[float, float],
) -> list[Axes]:
    """Axes of one size, so far apart, in rows from an upper left corner on, all in inches."""
    across, down = (wide + more for wide, more in zip(size, apart, strict=True))
    places = (divmod(i, columns) for i in range(count))
    return [canvas.axes(left + i * across, top + j * down, *size) for j, i in places]


def tiling(count: int, most: int) -> tuple[int, int]:
    """Rows and columns of panels in even rows, at most so many in each."""
    rows = -(-count // most)
    return rows, -(-count // rows)


def grid(
    title: str,
    words: str,
    count: int,
    most: int,
    size: tuple[float, float],
    *,
    sides: tuple[float, float, float],
    top: float,
    below: float,
    foot: float = 0.0,
    least: float = 0.0,
) -> tuple[Canvas, list[Axes]]:
    """Panels of one size in even rows under a heading, all in inches.

    Args:
        title, words: of the heading.
        count: of panels.
        most: panels in a row.
        size: of a panel.
        sides: room left of the panels, between two of a row, and right of them.
        top: where the first row begins.
        below: room under each row.
        foot: room under the last one, for what comes there.
        least: width of the picture; the panels are in its middle.
    """
    rows, columns = tiling(count, most)
    left, between, right = sides
    inside = left + columns * (size[0] + between) - between + right
    canvas = Canvas(max(inside, least), top + rows * (size[1] + below) + foot)
    heading(canvas, title, words)
    left += (canvas.width - inside) / 2
    return canvas, tiles(canvas, count, columns, left, top, size, (between, below))


def constrained(
    title: str, shape: tuple[int, int], size: tuple[float, float], **options: Any
) -> tuple[Figure, Any]:
    """A picture of a size in inches, with no more room around its panels than they need.

    Returns:
        the figure, and its axes by row and column.
    """
    figure = new_figure(*size)
    figure.set_layout_engine("constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(*shape, squeeze=False, **options)


def legend_below(figure: Figure, of: Axes | Sequence[Artist]) -> None:
    """What the lines of some axes, or others, stand for, below a :func:`constrained` picture."""
    handles = of if isinstance(of, Sequence) else of.get_legend_handles_labels()[0]
    style: dict[str, Any] = {"ncols": 4, "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, loc="outside lower center", **style)


def legend_above(canvas: Canvas, y: float, handles: Sequence[Artist]) -> None:
    """What lines and colours stand for in all panels, in a line at a height of the canvas."""
    place = (0.5, 1 - y / canvas.height)
    style: dict[str, Any] = {"loc": "center", "bbox_to_anchor": place, "frameon": False}
    canvas.figure.legend(handles=handles, ncols=len(handles), fontsize=10, **style)


def plain(axes: Axes, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Small ticks, a faint grid, no frame at the top and on the right; and what stands around."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=8.5, labelpad=1)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    unframed(axes)


def show_on(axes: Axes, images: Tensor, columns: int) -> None:
    """Images, (N, C, H, W), side by side, as all that some axes show."""
    axes.set_axis_off()
    picture = sample_grid(images, columns=columns, zoom=max(1, 64 // images.shape[-1]))
    axes.imshow(picture, interpolation="nearest", aspect="auto")


def show_rows(
    canvas: Canvas, x: float, y: float, rows: Sequence[tuple[str, Tensor]], cell: float
) -> float:
    """Rows of images with their labels on the left; where the next one would begin."""
    for label, images in rows:
        canvas.write(x - 0.11, y + cell / 2, label, fontsize=9, ha="right", color=DARK)
        show_on(canvas.axes(x, y, cell * len(images), cell), images, len(images))
        y += cell + BETWEEN
    return y


def show_chains(
    canvas: Canvas,
    x: float,
    y: float,
    images: Tensor,
    heads: Sequence[str],
    cell: float,
    *,
    framed: Collection[int],
    colour: str,
) -> None:
    """Chains on their way, a row for each, with what stands above the columns.

    Args:
        canvas: to draw on.
        x, y: the upper left corner of the images, below the heads.
        images: (chains, stops, C, H, W).
        heads: of the stops.
        cell: the size of an image in inches.
        framed: which stops are framed, one after the other.
        colour: of the frame and of its heads.
    """
    from matplotlib.patches import Rectangle

    for i, head in enumerate(heads):
        style = {"color": colour, "weight": "bold"} if i in framed else {"color": DARK}
        canvas.write(x + (i + 0.5) * cell, y - 0.06, head, fontsize=8.5, va="bottom", **style)
    count = len(heads)
    axes = canvas.axes(x, y, cell * count, cell * len(images))
    show_on(axes, images.flatten(0, 1), count)
    corner, size = (min(framed) / count, 0), (len(framed) / count, 1)
    frame = Rectangle(corner, *size, fill=False, edgecolor=colour, lw=2, clip_on=False)
    axes.add_patch(frame).set_transform(axes.transAxes)
