"""What the studies' pictures are made of: a heading, panels, images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .canvas import DARK, Canvas, unframed
from .images import sample_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def heading(canvas: Canvas, title: str, words: str) -> None:
    """A title, and a line of words under it."""
    canvas.write(canvas.width / 2, 0.25, title, fontsize=13)
    canvas.write(canvas.width / 2, 0.53, words, fontsize=9, color=DARK)


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
    (width, height), (left, between, right) = size, sides
    inside = left + columns * (width + between) - between + right
    canvas = Canvas(max(inside, least), top + rows * (height + below) + foot)
    heading(canvas, title, words)
    left += (canvas.width - inside) / 2
    panels = [
        canvas.axes(
            left + i % columns * (width + between), top + i // columns * (height + below), *size
        )
        for i in range(count)
    ]
    return canvas, panels


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
