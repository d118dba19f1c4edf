"""What a figure of short-run models consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Made:
    """A figure as it is printed and written.

    Attributes:
        figure: the picture.
        text: tables in Markdown, and what they say in words.
        numbers: the same as plain values: numbers, strings, None, and dicts, lists and tuples of
            them. Floats may be NaN or infinite.
    """

    figure: Figure
    text: str
    numbers: dict[str, Any]
