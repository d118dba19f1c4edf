"""What the studies' pictures are made of: colours, figures, panels, legends, images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ebmguard.errors import ConfigError

from .images import sample_grid

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Blue, vermillion, green and purple, of the palette that colour-blind readers can tell apart."""

CONTRASTS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Eight of it for runs side by side, vermillion first: it is that of the smallest β*."""

DARK = "#444444"


def new_figure(width: float, height: float) -> Figure:
    """An empty picture of a size in inches."""
    # Without pyplot, so that no window system is asked for and nothing global changes.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150)


def unframed(axes: Axes) -> None:
    """A faint grid, and no frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)


def check_picture(file: Path) -> None:
    """Find out whether a picture could be written there, before anything slow is computed."""
    formats = new_figure(1, 1).canvas.get_supported_filetypes()
    if file.suffix[1:] not in formats:
        known = ", ".join(sorted(formats))
        raise ConfigError(f"{file} cannot be written: a picture's name ends in one of {known}")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(
            f"{file} cannot be written: expected a file in a folder that is there and open to you"
        )


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
