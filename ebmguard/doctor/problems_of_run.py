"""A run folder in, its problems out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..alerts import Level
from ..check import Problem, in_order
from .run import FinishedRun, read_run
from .run_events import of_alerts, of_numbers, of_outcome, of_rollbacks
from .run_values import of_optimizer, of_sampler, of_weights

__all__ = ["problems_of_run"]

CHECKS: tuple[Callable[[FinishedRun], Iterator[Problem]], ...] = (
    of_outcome,
    of_numbers,
    of_alerts,
    of_rollbacks,
    of_weights,
    of_sampler,
    of_optimizer,
)


def problems_of_run(path: Path) -> list[Problem]:
    """Every problem of a run folder, the worst first.

    Raises:
        ConfigError: it is no run folder, or a file in it is damaged.
    """
    run = read_run(path)
    if not run.rows:
        return [
            Problem(Level.ERROR, "empty", "metrics.jsonl", "No step has been recorded.", "run it.")
        ]
    return in_order(problem for check in CHECKS for problem in check(run))
