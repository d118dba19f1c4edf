"""A problem is data: what is wrong, where, how bad it is, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..alerts import Level

__all__ = ["Problem", "in_order", "some"]

_SHOWN = 3


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


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """The worst first; equally bad ones in the order in which they were found."""
    return sorted(problems, key=lambda problem: -problem.severity)


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    known = [name or "the module itself" for name in names]
    rest = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + rest
