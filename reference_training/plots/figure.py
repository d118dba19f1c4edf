"""`ebmguard figure` of runs that are there: what its commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ..engine.run_folder import write_json
from .canvas import check_picture, save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Made:
    """A figure as it is printed and written.

    Attributes:
        figure: the picture.
        text: tables in Markdown, and what they say in words.
        numbers: the same as plain values, which are written beside the picture: numbers, strings,
            None, and dicts, lists and tuples of them. Floats may be NaN or infinite.
    """

    figure: Figure
    text: str
    numbers: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RunsFigure:
    """What every figure of runs is told."""

    name: tyro.conf.Positional[str]
    """Number in the paper, or the study's name."""
    runs: tuple[Path, ...]
    """Run folders."""
    out: Path | None = None
    """The picture; the default is figure_NAME.png."""

    @property
    def file(self) -> Path:
        """Where the picture goes."""
        name = self.name.replace("-", "_")
        return Path(f"figure_{name}.png") if self.out is None else self.out


def draw(config: RunsFigure, make: Callable[[], Made]) -> int:
    """Make a figure, write its picture and its numbers, print its text.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: the picture cannot be written.
        DiskError: the numbers cannot be written.
        ImportError: matplotlib is not installed.
    """
    # What draws is tried before anything slow is computed for it, not after that.
    check_picture(config.file)
    made = make()
    save_picture(made.figure, config.file)
    lines = [made.text, "", f"picture: {config.file}"]
    if made.numbers is not None:
        file = config.file.with_suffix(".json")
        write_json(file, made.numbers)
        lines.append(f"numbers: {file}")
    print("\n".join(lines))
    return 0
