"""What the studies' pictures are made of: panels, legends, images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .canvas import new_figure, unframed
from .images import sample_grid

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def tiling(count: int, most: int) -> tuple[int, int]:
    """Rows and columns of panels in even rows, at most so many in each."""
    rows = -(-count // most)
    return rows, -(-count // rows)


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
