"""Settings of `ebmguard figure bilevel`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ebmguard.errors import ConfigError

from ...plots.figure import RunsFigure


@dataclass(frozen=True)
class FigureConfig(RunsFigure):
    """Measure the bias of bi-level gradients, beside what bounds it, for runs of several N and K.

    Nothing is trained. At the end of each run the gradient through its N unrolled steps is held
    against that with the exact posterior, at the same minibatches and random numbers.
    """

    name: tyro.conf.Positional[Literal["bilevel"]]
    """The study's name."""
    runs: tuple[Path, ...]
    """Run folders of `ebmguard train bism` by bidsm, bissm or bimdsm; seeds of one N and K are
    averaged."""
    minibatches: int = 200
    """Of each run."""
    seed: int = 0
    """Seed of the minibatches, and of the update's random numbers."""

    def check(self) -> None:
        """Refuse settings that cannot be meant.

        Raises:
            ConfigError: names what is wrong, and what was expected.
        """
        if not self.runs or self.minibatches < 2 or not 0 <= self.seed < 2**63:
            raise ConfigError(
                f"runs has {len(self.runs)} folders, minibatches is {self.minibatches}, seed is "
                f"{self.seed}; expected at least one folder, 2 minibatches or more, and a seed "
                "from 0, less than 2**63"
            )
