"""A problem is data: what is wrong, where, how bad it is, and how to fix it; and in plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from ..alerts import Level
from ..errors import printable, typed

__all__ = ["Problem", "error", "in_order", "info", "show", "some", "to_text", "warn"]

_SHOWN = 3
_WIDTH = 100
_HEADS = {
    Level.ERROR: ("error", "bold red"),
    Level.WARN: ("warning", "yellow"),
    Level.INFO: ("note", "cyan"),
}


@dataclass(frozen=True)
class Problem:
    """One thing to know before a run, or about one.

    Attributes:
        severity: ERROR trains the wrong thing or will stop the run, WARN often goes wrong, INFO is
            only worth knowing.
        name: of the check, for example ``"batch_norm"``.
        where: what it was found in: ``"the energy module"``, ``"train.py:120"``, a tag of a run.
        what: what is wrong, with the numbers at hand.
        fix: what to do, in code where code does it.
    """

    severity: Level
    name: str
    where: str
    what: str
    fix: str

    @property
    def message(self) -> str:
        """The problem in words."""
        return f"{self.severity.name} {self.name}: {self.where}: {self.what} Fix: {self.fix}"


error, warn, info = (partial(Problem, level) for level in (Level.ERROR, Level.WARN, Level.INFO))


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """The worst first; equally bad ones in the order in which they were found."""
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
    except ImportError:
        print(to_text(problems))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        print(to_text(problems))
        return
    for line, style in _lines(problems, min(console.width, _WIDTH)):
        console.print(Text(line, style=style))


def _lines(problems: Sequence[Problem], width: int) -> Iterator[tuple[str, str]]:
    """Lines, each with its style in rich."""
    if not problems:
        yield "no problems found", "green"
    fold = partial(textwrap.wrap, width=width - 4, break_long_words=False, break_on_hyphens=False)
    worst = max((problem.severity for problem in problems), default=None)
    for level, group in groupby(in_order(problems), key=lambda problem: problem.severity):
        if level is not worst:
            yield "", ""
        found, (noun, colour) = list(group), _HEADS[level]
        yield f"{len(found)} {noun}{'s' if len(found) > 1 else ''}", colour
        for problem in found:
            yield printable(f"  {problem.where}  {problem.name}"), "bold"
            for start, text, style in (("", problem.what, ""), ("fix: ", problem.fix, "green")):
                lines = fold(
                    printable(text), initial_indent=start, subsequent_indent=" " * len(start)
                )
                yield from ((f"    {line}", style) for line in lines)
