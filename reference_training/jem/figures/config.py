"""Settings of `ebmguard figure` for the figures of JEM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ...plots.figure import RunsFigure


@dataclass(frozen=True)
class FigureConfig(RunsFigure):
    """Draw a JEM figure of the paper from runs that are there, and print its numbers.

    3 and 16 show scenario 1, 20 to 25 scenarios 2 to 7: the runs of the figure's scenario are
    taken, finished or not, one colour for each β*. 4, 17, 18 and 19 show samples of scenario 1, at
    β* = 0.5, 0, 0.5 and 10. Nothing is trained.
    """

    name: tyro.conf.Positional[
        Literal["3", "4", "16", "17", "18", "19", "20", "21", "22", "23", "24", "25"]
    ]
    """Number in the paper."""
    runs: tuple[Path, ...]
    """Run folders of `ebmguard train jem`, or folders with some anywhere below."""
