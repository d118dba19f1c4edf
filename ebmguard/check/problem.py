"""The input of the checks and their results: a problem is data, and can be shown as text."""

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
    *("CHAINS", "Problem", "Setup", "brief", "by_severity", "error", "info", "show"),
    *("to_text", "warn"),
]

CHAINS = "the chains"
"""The place of problems of chains, which a few steps may refute."""

_SHOWN = 3
_WIDTH = 100
_HEADS = {
    Level.ERROR: ("error", "bold red"),
    Level.WARN: ("warning", "yellow"),
    Level.INFO: ("note", "cyan"),
}


@dataclass(frozen=True)
class Setup:
    """The arguments of :func:`ebmguard.guard` and the state of the run; None is unknown.

    Attributes:
        beta_star, factor: exponents of the first step, one for every member, and factors on the
            energy during sampling.
        tempers: whether the sampler's factor is known, or still to be measured.
        measured: the measured kind of sampler, in words; empty before its first call.
        models: number of model dimensions of an ensemble.
        not_followed: the changes of rollbacks that this run cannot follow, in words.
        chains: "kept" if a rollback puts back chains that the loop feeds back; else "copied".
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
    what: str  # the problem, with its numbers
    fix: str  # in code if code does it

    @property
    def message(self) -> str:
        """The problem in words."""
        return f"{self.severity.name} {self.name}: {self.where}: {self.what} Fix: {self.fix}"


error, warn, info = (partial(Problem, level) for level in (Level.ERROR, Level.WARN, Level.INFO))


def by_severity(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems, the worst first, else in the given order."""
    return sorted(problems, key=lambda problem: -problem.severity)


def brief(names: Iterable[str]) -> str:
    """Join the first few names, and the number of the others."""
    known = [name or "the module itself" for name in names]
    rest = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + rest


def to_text(problems: Sequence[Problem]) -> str:
    """Return the problems as text in groups, the worst first."""
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
    groups = groupby(by_severity(problems), key=lambda problem: problem.severity)
    for i, (level, group) in enumerate(groups):
        if i:
            yield "", ""
        members, (noun, colour) = list(group), _HEADS[level]
        yield f"{len(members)} {noun}{'s' if len(members) > 1 else ''}", colour
        for problem in members:
            yield printable(f"  {problem.where}  {problem.name}"), "bold"
            yield from ((f"    {line}", "") for line in fold(printable(problem.what)))
            for line in fold(printable(f"fix: {problem.fix}"), subsequent_indent="     "):
                yield f"    {line}", "green"
