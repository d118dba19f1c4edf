"""What the checks look at, and what they find: a problem is data, and can be shown as text."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..alerts import Level
from ..errors import printable, spelled, typed

if TYPE_CHECKING:
    from torch import Tensor

    from ..trainer import Trainer

__all__ = [
    "CHAINS",
    "Problem",
    "Setup",
    "error",
    "in_order",
    "info",
    "show",
    "some",
    "to_text",
    "warn",
]

CHAINS = "the chains"
"""Where a problem of chains is, which a few steps may show to be none."""

_SHOWN = 3
_WIDTH = 100
_HEADS = {
    Level.ERROR: ("error", "bold red"),
    Level.WARN: ("warning", "yellow"),
    Level.INFO: ("note", "cyan"),
}


@dataclass(frozen=True)
class Setup:
    """What :func:`ebmguard.guard` was told; None stands for what it was not.

    Attributes:
        beta_star, factor: exponents of the first step, one for each member, and what multiplies
            the energy during sampling.
        tempers: whether the sampler's factor is known, or still to be measured.
        measured: in words, what the sampler was found to be; empty before its first call.
        models: number of model dimensions of an ensemble.
        not_followed: in words, what a rollback would change but cannot in this run.
        chains: "kept" where a rollback takes those along that the loop feeds back, "copied" where
            it cannot.
        unknown: diagnostics that were NaN in every row so far.
        is_stuck: whether all gradients of a sampler call were equal, in every row so far.
        is_running: whether steps go on: nothing is raised, and no tensor is read.
        example: a batch of inputs to try the model on.
    """

    trainer: Trainer
    has_sampler: bool = True
    beta_star: tuple[float, ...] = (0.5,)
    output_scale: float | None = None
    tempers: bool = False
    measured: str = ""
    factor: tuple[float, ...] = (1.0,)
    sign: int = 1
    action: str = "warn"
    judge_in_loss: bool | None = None
    has_sinks: bool = True
    misses_ranks: bool = False
    models: int = 0
    not_followed: tuple[str, ...] = ()
    chains: str = ""
    unknown: frozenset[str] = frozenset()
    is_stuck: bool = False
    is_running: bool = False
    example: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """A finding: ERROR trains the wrong thing or stops the run, WARN often goes wrong."""

    severity: Level
    name: str  # of the check, for example ``"batch_norm"``
    where: str  # "the energy module", "train.py:120", a tag of a run
    what: str  # is wrong, with the numbers at hand
    fix: str  # in code where code does it

    @property
    def message(self) -> str:
        """The problem in words."""
        return f"{self.severity.name} {self.name}: {self.where}: {self.what} Fix: {self.fix}"


error, warn, info = (partial(Problem, level) for level in (Level.ERROR, Level.WARN, Level.INFO))


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """The worst first, else as they were found."""
    return sorted(problems, key=lambda problem: -problem.severity)


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    known = [name or "the module itself" for name in names]
    rest = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + rest


def to_text(problems: Sequence[Problem]) -> str:
    """The problems in groups, worst first."""
    return "\n".join(line for line, _ in _lines(problems, _WIDTH))


@typed
def show(problems: Sequence[Problem]) -> None:
    """Print the problems: in colour where rich is installed and the output is a terminal."""
    try:
        from rich.console import Console
        from rich.text import Text

        console: Any = Console(highlight=False)
    except ImportError:
        console = None
    if console is None or not console.is_terminal:
        print(spelled(to_text(problems), getattr(sys.stdout, "encoding", None) or "utf-8"))
        return
    for line, style in _lines(problems, min(console.width, _WIDTH)):
        console.print(Text(line, style=style))


def _lines(problems: Sequence[Problem], width: int) -> Iterator[tuple[str, str]]:
    if not problems:
        yield "no problems found", "green"
    fold = partial(textwrap.wrap, width=width - 4, break_long_words=False, break_on_hyphens=False)
    groups = groupby(in_order(problems), key=lambda problem: problem.severity)
    for i, (level, group) in enumerate(groups):
        if i:
            yield "", ""
        found, (noun, colour) = list(group), _HEADS[level]
        yield f"{len(found)} {noun}{'s' if len(found) > 1 else ''}", colour
        for problem in found:
            yield printable(f"  {problem.where}  {problem.name}"), "bold"
            yield from ((f"    {line}", "") for line in fold(printable(problem.what)))
            for line in fold(printable(f"fix: {problem.fix}"), subsequent_indent="     "):
                yield f"    {line}", "green"
