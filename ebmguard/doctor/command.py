"""`ebmguard doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from ..alerts import Level
from ..check import Problem, show
from ..errors import ConfigError
from ..report.problems import problems_of_run
from .problems_of_source import diagnose
from .retrofit import Change

__all__ = ["DoctorConfig", "doctor"]

FOUND_ERRORS = 1


@dataclass(frozen=True)
class DoctorConfig:
    """List every problem of a trainer or of a run, each with its fix.

    A trainer's file is read, not run. The exit status is 1 where there is an error.
    """

    what: tyro.conf.Positional[Path]
    """The Python file of a trainer, or the folder of a run."""


def doctor(config: DoctorConfig) -> int:
    """List the problems.

    Returns:
        exit status: 1 where a problem is an error, else 0.

    Raises:
        ConfigError: neither a file of Python nor a run folder.
    """
    path = config.what
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name the file of a trainer or a run folder.")
    if path.is_dir():
        problems = problems_of_run(path)
        show(problems)
    else:
        found = diagnose(path)
        problems = found.problems
        show(problems)
        _print_changes(path, found.changes)
    return FOUND_ERRORS if _has_errors(problems) else 0


def _has_errors(problems: list[Problem]) -> bool:
    return any(problem.severity is Level.ERROR for problem in problems)


def _print_changes(path: Path, changes: list[Change]) -> None:
    if not changes:
        return
    print(f"\nto guard {path.name}:")
    for line, old, new in changes:
        print(f"  {'at' if old else 'after'} line {line}")
        for each in old:
            print(f"    - {each}")
        for each in new:
            print(f"    + {each}")
