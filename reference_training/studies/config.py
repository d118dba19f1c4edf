"""Settings of `ebmguard figure` and `ebmguard table jem`; no module here imports torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro

from ..engine.run_config import below, command_words, refuse


@dataclass(frozen=True)
class RunsFigure:
    """What every study of runs that are there is told. Nothing is trained."""

    name: tyro.conf.Positional[str]
    """Number in the paper, or the study's name."""
    runs: tuple[Path, ...]
    """Run folders."""
    out: Path | None = None
    """The picture; its numbers are written beside it as .json. The default is figure_NAME.png."""

    least: ClassVar[dict[str, int]] = {}
    """Of whole numbers."""

    def picture(self, name: str) -> Path:
        """Where a picture of this name goes: there is one, without a name."""
        return self.out or Path(f"figure_{self.name.replace('-', '_')}.png")

    @property
    def numbers(self) -> Path:
        """Where the numbers go: beside the picture."""
        return self.picture("").with_suffix(".json")

    def check(self) -> None:
        """Refuse settings that cannot be meant, all of them in one error."""
        problems = below(self, **self.least)
        if not self.runs:
            problems.append("runs is empty, expected folders of the runs that the figure shows")
        refuse(problems, "a figure")


@dataclass(frozen=True)
class ToyFigure:
    """Draw a toy figure of the paper, or one of ours, with its numbers; train what it needs first.

    1d is the paper's comparison in one dimension; mixture and broken are of several samplers at
    once. The folder holds one run for each scenario of the figure. A finished run is used as it is,
    an unfinished one is resumed, a missing one is trained. Then the pictures, tradeoff.png (of
    several samplers: curves.png), table.md and results.json are written.
    """

    name: tyro.conf.Positional[str]
    """Number in the paper, or the study's name."""
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
    def folder(self) -> Path:
        """Where runs and pictures lie."""
        return self.out or Path("figures") / self.name

    @property
    def numbers(self) -> Path:
        """Where the numbers go."""
        return self.folder / "results.json"

    def picture(self, name: str) -> Path:
        """Where a picture of this name goes."""
        return self.folder / f"{name}.png"

    def command(self) -> str:
        """The command line that draws this figure, defaults left out."""
        return shlex.join(command_words(self, "ebmguard", "figure", self.name, hidden=("name",)))


@dataclass(frozen=True)
class JemFigure(RunsFigure):
    """Draw a JEM figure of the paper from runs that are there, and print its numbers.

    The folders are those of `ebmguard train jem`, or have some anywhere below. 3 and 16 show
    scenario 1, 20 to 25 scenarios 2 to 7: the runs of the figure's scenario are taken, finished or
    not, one colour for each β*. 4, 17, 18 and 19 show samples of scenario 1, at β* = 0.5, 0, 0.5
    and 10. Nothing is trained.
    """


@dataclass(frozen=True)
class BilevelFigure(RunsFigure):
    """Measure the bias of bi-level gradients, beside what bounds it, for runs of several N and K.

    The runs are of `ebmguard train bism` by bidsm, bissm or bimdsm; seeds of one N and K are
    averaged. Nothing is trained. At the end of each run the gradient through its N unrolled steps
    is held against that with the exact posterior, at the same minibatches and random numbers.
    """

    minibatches: int = 200
    """Of each run."""
    seed: int = 0
    """Seed of the minibatches, and of the update's random numbers."""

    least: ClassVar[dict[str, int]] = {"minibatches": 2, "seed": 0}


@dataclass(frozen=True)
class TableConfig:
    """Print Tables 1 and 2 of the paper beside the numbers of JEM runs, and a list of the runs.

    Runs that are not over are listed too, with what they have, and marked. Nothing is trained.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders of `ebmguard train jem`, or folders with some anywhere below."""
    out: Path | None = None
    """File for the same page, in Markdown."""


@dataclass(frozen=True)
class ShortRunFigure(RunsFigure):
    """Draw a figure of short-run models from runs of `ebmguard train shortrun`, with its numbers.

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

    least: ClassVar[dict[str, int]] = {"count": 1, "threads": 0, "seed": 0}
