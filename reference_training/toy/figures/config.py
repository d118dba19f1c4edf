"""Settings of `ebmguard figure`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro

from ..config import ToyConfig
from .specs import FIGURES, FigureSpec


@dataclass(frozen=True)
class FigureConfig:
    """Draw a toy figure of the paper, or one of ours, with its numbers; train what it needs first.

    The folder holds one run for each scenario of the figure. A finished run is used as it is, an
    unfinished one is resumed, a missing one is trained. Then the pictures, tradeoff.png (of several
    samplers: curves.png), table.md and results.json are written.
    """

    name: tyro.conf.Positional[
        Literal["2", "5", "6", "7", "8", "9", "10", "11", "1d", "mixture", "broken"]
    ]
    """Number in the paper; 1d is the same comparison in one dimension, mixture and broken are of
    several samplers at once."""
    out: Path | None = None
    """Folder of the figure; the default is figures/NAME."""
    seeds: int | None = None
    """Seeds of each β and variant; the default is the figure's, 3 or 5."""
    iterations: int | None = None
    """Updates of every run; the default is each scenario's."""
    device: str = "auto"
    """auto takes a GPU where there is one; or a name that PyTorch knows, such as cpu or cuda:1."""
    threads: int = 0
    """CPU threads of PyTorch; 0 is its own choice, the machine's cores."""

    @property
    def spec(self) -> FigureSpec:
        """What the figure shows."""
        return FIGURES[self.name]

    @property
    def folder(self) -> Path:
        """Where runs and pictures lie."""
        return Path("figures") / self.name if self.out is None else self.out

    def training(self, scenario: str) -> ToyConfig:
        """The run of one of the figure's scenarios."""
        most = ToyConfig.evaluations
        return ToyConfig(
            out=self.folder / scenario,
            scenario=scenario,
            betas=self.spec.betas,
            variants=self.spec.variants,
            seeds=self.spec.seeds if self.seeds is None else self.seeds,
            iterations=self.iterations,
            # A run of a few updates cannot be evaluated more often than it is updated.
            evaluations=most if self.iterations is None else max(1, min(most, self.iterations)),
            device=self.device,
            threads=self.threads,
        )

    def command(self) -> str:
        """The command line that draws this figure, defaults left out."""
        words = ["ebmguard", "figure", self.name]
        for option in fields(self)[1:]:
            value = getattr(self, option.name)
            if value != option.default:
                words += [f"--{option.name}", str(value)]
        return shlex.join(words)
