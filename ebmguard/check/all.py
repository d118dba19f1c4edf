"""All checks, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .chains import of_chains
from .consequences import of_consequences
from .exponents import of_exponents
from .network import of_network
from .outputs import of_outputs
from .problem import Problem, in_order
from .setup import Setup
from .training import of_training

__all__ = ["CHECKS", "find_problems"]

CHECKS: tuple[Callable[[Setup], Iterator[Problem]], ...] = (
    of_network,
    of_outputs,
    of_exponents,
    of_training,
    of_chains,
    of_consequences,
)


def find_problems(setup: Setup) -> list[Problem]:
    """Every problem of a trainer, the worst first."""
    return in_order(problem for check in CHECKS for problem in check(setup))
