"""Settings of `ebmguard sweep jem`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import tyro

from ebmguard.errors import ConfigError

from ..config import JemConfig
from .cell import Cell

OWN = ("--out", "--scenario", "--beta-star", "--seed", "--resume", "--no-resume")
"""Options of `ebmguard train jem` that each cell has from its place in the grid."""


@dataclass(frozen=True)
class SweepConfig:
    """Train a grid of JEM runs, or go on with one: scenarios × β* × seeds.

    What follows `--` goes to every `ebmguard train jem`. Each run has a folder of its own and a log
    beside it. Finished runs are kept, unfinished ones are resumed, and OUT/table.md is written anew
    after each. One run at a time on each GPU, or on each core where there is none; on several
    machines start this with torchrun, one process per GPU, and with an OUT that they share.
    """

    out: Path
    """Folder of the grid."""
    scenarios: tuple[str, ...]
    """Scenarios of the paper's Appendix M.1 by number, or "digits"."""
    beta_stars: tuple[float, ...]
    """Exponents of the guard's weights; 0 is the standard trainer."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of every scenario and β*."""
    workers: int | None = None
    """Runs at a time; the default is the number of GPUs, else of CPU cores. They take turns on the
    GPUs where there are fewer."""
    training: tyro.conf.Positional[tuple[str, ...]] = ()
    """Options of every run, after "--"; see ebmguard train jem --help."""

    def cells(self) -> list[Cell]:
        """Every run of the grid in the order of the work, their settings checked.

        Seeds are outermost, so that a grid which is half done compares all scenarios and β*.

        Raises:
            ConfigError: there is nothing to run, a value is there twice, or the settings do not
                make a run.
            SystemExit: `training` is no command line of `ebmguard train jem`; it says why.
        """
        problems = []
        for name in ("scenarios", "beta_stars", "seeds"):
            values = getattr(self, name)
            if not values:
                problems.append(f"{name} is empty, expected at least one value")
            problems += [
                f"{name} has {v} twice" for v in sorted(set(values)) if values.count(v) > 1
            ]
        if self.workers is not None and self.workers < 1:
            problems.append(f"workers is {self.workers}, expected at least 1")
        given = [word.partition("=")[0].replace("_", "-") for word in self.training]
        problems += [f"{name} after -- is the grid's own to give" for name in OWN if name in given]
        if problems:
            raise ConfigError("the settings do not make a grid:\n  " + "\n  ".join(problems))
        cells = [
            self._cell(scenario, beta_star, seed)
            for seed in self.seeds
            for scenario in self.scenarios
            for beta_star in self.beta_stars
        ]
        for cell in cells:
            cell.config.check()
        return cells

    def _cell(self, scenario: str, beta_star: float, seed: int) -> Cell:
        exponent = _short(beta_star)
        name = f"s{scenario}" if scenario.isdecimal() else scenario
        words = (
            *self.training,
            *("--out", str(self.out / f"{name}_b{exponent}_seed{seed}")),
            *("--scenario", scenario, "--beta-star", exponent, "--seed", str(seed)),
        )
        return Cell(words, tyro.cli(JemConfig, prog="ebmguard train jem", args=words))

    def command(self) -> str:
        """The command line of this grid."""
        words = ["ebmguard", "sweep", "jem", "--out", self.out]
        words += ["--scenarios", *self.scenarios, "--beta-stars", *map(_short, self.beta_stars)]
        words += ["--seeds", *self.seeds]
        if self.workers is not None:
            words += ["--workers", self.workers]
        if self.training:
            words += ["--", *self.training]
        return shlex.join(map(str, words))


def _short(value: float) -> str:
    """All digits of a number, without those of a whole number's fraction."""
    return str(value).removesuffix(".0")
