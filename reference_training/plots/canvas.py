"""Pictures: colours, an empty one of a size, and whether one could be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ebmguard.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Blue, vermillion, green and purple, of the palette that colour-blind readers can tell apart."""

CONTRASTS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Eight of it for runs side by side, vermillion first: it is that of the smallest β*."""

DARK = "#444444"
DPI = 150


def new_figure(width: float, height: float) -> Figure:
    """An empty picture of a size in inches."""
    try:
        # Without pyplot, so that no window system is asked for and nothing global changes.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "ebmguard[train]"') from error
    return Figure(figsize=(width, height), dpi=DPI)


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
