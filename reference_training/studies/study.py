"""What a study is, and its frame of numbers as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from torch import Tensor

from ..plots.numbers import markdown_table, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "about"
"""The column that says in words what a row's run is."""


@dataclass(frozen=True)
class Study:
    """Runs to numbers, and numbers to a picture.

    Attributes:
        title: of the picture.
        source: the equation, figure or section that it reproduces.
        runs: the settings of the command -> the runs; None where Ctrl-C stopped a training.
        numbers: (runs, the settings of the command) -> the frame; raises ConfigError where the runs
            lack what the study shows.
        draw: (the frame, the title) -> the picture, or several by the name of the file.
        columns: what the columns of the frame are.
        claim: what the paper says that the numbers should show; "" for nothing.
        holds: whether they do, None where they cannot tell; needed where there is a claim.
    """

    title: str
    source: str
    runs: Callable[[Any], Any]
    numbers: Callable[[Any, Any], pd.DataFrame]
    draw: Callable[[pd.DataFrame, str], Figure | Mapping[str, Figure]]
    columns: str
    claim: str = ""
    holds: Callable[[pd.DataFrame], bool | None] = lambda _: None

    def drawn(self, frame: pd.DataFrame) -> Mapping[str, Figure]:
        """The pictures by the names of their files, "" where there is one."""
        data = frame.attrs.get("data")
        found = self.draw(frame, self.title + (f", {data}" if data else ""))
        return found if isinstance(found, Mapping) else {"": found}

    def verdict(self, frame: pd.DataFrame) -> str:
        """One line: the claim, and whether it holds."""
        if not self.claim:
            return ""
        words = {True: "holds", False: "does not hold", None: "cannot be told"}
        return f"Claim: {self.claim}: {words[self.holds(frame)]}."


def frame_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a frame, None where a row lacks a column.

    Of its cells NumPy arrays are numbers that the table has no room for; tensors and mappings are
    of the picture alone.
    """
    names = [*dict.fromkeys(name for row in rows for name in row)]
    # Of objects, so that None, which is no number, and NaN, which is undefined, stay apart; and
    # filled one by one, so that nobody looks into arrays and tensors.
    cells = np.empty((len(rows), len(names)), dtype=object)
    for (i, row), (j, name) in product(enumerate(rows), enumerate(names)):
        cells[i, j] = row.get(name)
    return pd.DataFrame(cells, columns=names)


def text(frame: pd.DataFrame) -> str:
    """The numbers as a table of Markdown, with what its runs are above it."""
    shown = [c for c in frame if c != ABOUT and frame[c].map(_is_shown).all()]
    words = next((i for i, c in enumerate(shown) if not isinstance(frame[c].iloc[0], str)), 1)
    cells = frame[shown].map(_cell).to_numpy().tolist()
    table = markdown_table([*map(str, shown)], cells, words=words)
    about = "\n".join(f"- {line}" for line in dict.fromkeys(frame.get(ABOUT, ())))
    return f"{about}\n\n{table}" if about else table


def _is_shown(value: Any) -> bool:
    return hasattr(value, "_asdict") or (np.ndim(value) == 0 and not isinstance(value, Mapping))


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as plain values for JSON, without None and what is of the picture."""
    hidden = (type(None), Tensor, Mapping)
    return [
        {str(name): _plain(x) for name, x in row.items() if not isinstance(x, hidden)}
        for row in frame.to_dict("records")
    ]


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return value._asdict()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def ascending(values: Sequence[float]) -> bool | None:
    """Whether every value is above the one before it; None of one value, or where one is NaN."""
    if len(values) < 2 or any(value != value for value in values):
        return None
    return all(a < b for a, b in pairwise(values))
