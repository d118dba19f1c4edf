"""`ebmguard check RUN`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from ..alerts import Level
from ..check import show
from .problems import problems_of_run

__all__ = ["CheckConfig", "check"]

FOUND_ERRORS = 1


@dataclass(frozen=True)
class CheckConfig:
    """List every problem of a run, each with its fix, by the limits of the alert rules.

    The exit status is 1 where there is an error.
    """

    run: tyro.conf.Positional[Path]
    """The folder of a run."""


def check(config: CheckConfig) -> int:
    """List the problems.

    Returns:
        exit status: 1 where a problem is an error, else 0.

    Raises:
        ConfigError: it is no run folder, or a file in it is damaged.
    """
    problems = problems_of_run(config.run)
    show(problems)
    return FOUND_ERRORS if any(each.severity is Level.ERROR for each in problems) else 0
