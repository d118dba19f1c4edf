"""Settings of `ebmguard figure` and `ebmguard table jem`; no module here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ebmguard.errors import ConfigError


@dataclass(frozen=True)
class RunsFigure:
    """What every study of runs that are there is told."""

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


@dataclass(frozen=True)
class ShortRunFigure(RunsFigure):
    """Draw a figure of short-run models from trained runs, and print its numbers.

    Nothing is trained. Of the robust objective's Appendix L, each for runs of several β*:

    - 12: f on data and on negatives during training, and the gap between them
    - 13: distributions of f on training data and on fresh negatives
    - 14: the same with negatives of 4 times the SGLD step size
    - 15: samples, from the same noise in every run, beside training images

    Of the short-run paper and its author response:

    - steps: samples after fewer and more SGLD steps than in training
    - interpolation: images between two samples, through their noise
    - reconstruction: noise found whose sample is a given image
    - likelihood: bits per dimension of the sampler as a flow
    - long-run: chains that go on for many times the steps of training
    """

    name: tyro.conf.Positional[
        Literal[
            "12",
            "13",
            "14",
            "15",
            "steps",
            "interpolation",
            "reconstruction",
            "likelihood",
            "long-run",
        ]
    ]
    """Number in the paper, or the study's name."""
    runs: tuple[Path, ...]
    """Run folders of `ebmguard train shortrun`."""
    out: Path | None = None
    """The picture; its numbers are written beside it as .json. The default is figure_NAME.png."""
    count: int | None = None
    """Images or chains; the default is the figure's own."""
    data_root: str | None = None
    """Folder of the data sets; None is that of each run, else the environment variable
    EBMGUARD_DATA."""
    seed: int = 0
    """Seed of the noise that chains start from, and of that of their steps."""
    device: str = "auto"
    """auto takes a GPU where there is one; or a name that PyTorch knows, such as cpu or cuda:1."""
    threads: int = 0
    """CPU threads of PyTorch; 0 is its own choice, the machine's cores."""

    def check(self) -> None:
        """Refuse settings that cannot be meant, all of them in one error.

        Raises:
            ConfigError: names every wrong setting, its value and what was expected.
        """
        problems = []
        if not self.runs:
            problems.append("runs is empty, expected run folders of `ebmguard train shortrun`")
        if self.count is not None and self.count < 1:
            problems.append(f"count is {self.count}, expected 1 or more")
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed is {self.seed}, expected 0 or more, and less than 2**63")
        if self.threads < 0:
            problems.append(f"threads is {self.threads}, expected 0 or more")
        if problems:
            raise ConfigError("the settings do not make a figure:\n  " + "\n  ".join(problems))
