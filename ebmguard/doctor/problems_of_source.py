"""A trainer's file in, its problems and the lines of its retrofit out. Nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..alerts import Level
from ..check import Problem, in_order
from ..errors import ConfigError
from .facts import Facts
from .in_guard import of_guard
from .in_loop import of_checkpoints, of_checks, of_means
from .in_network import of_network
from .in_sampler import of_samplers, of_scale
from .retrofit import Change, retrofit
from .source import Source

__all__ = ["Diagnosis", "diagnose"]

CHECKS: tuple[Callable[[Facts], Iterator[Problem]], ...] = (
    of_checks,
    of_guard,
    of_means,
    of_samplers,
    of_scale,
    of_network,
    of_checkpoints,
)


@dataclass(frozen=True)
class Diagnosis:
    """What a file has shown.

    Attributes:
        problems: the worst first.
        changes: lines that would put the guard in; empty where it is in, or nothing to change was
            found.
    """

    problems: list[Problem]
    changes: list[Change]


def diagnose(path: Path) -> Diagnosis:
    """Read a trainer and say what is wrong with it.

    Files of the same folder that it imports are looked at for the network.

    Raises:
        ConfigError: it cannot be read, or is not Python.
    """
    facts = Facts.of(Source.read(path), _beside(path))
    problems = [problem for check in CHECKS for problem in check(facts)]
    changes: list[Change] = []
    if not facts.usages:
        changes = retrofit(facts.source, facts.samplers, facts.differences)
        problems.append(_not_guarded(facts, changes))
    return Diagnosis(in_order(problems), changes)


def _not_guarded(facts: Facts, changes: list[Change]) -> Problem:
    if changes:
        what = "The trainer is not guarded."
        fix = "the lines below; for a published trainer, the adapter that docs/retrofit.md names."
    else:
        missing = [
            word
            for word, found in (
                ("a sampling loop", any(each.energy is not None for each in facts.samplers)),
                ("a difference of energies", bool(facts.differences)),
            )
            if not found
        ]
        what = f"The file is not guarded, and {' and '.join(missing)} was not found in it."
        fix = (
            "name the file with the training loop; a sampler or a loss that lives elsewhere is "
            "guarded all the same: docs/retrofit.md."
        )
    return Problem(Level.INFO, "not_guarded", facts.source.path.name, what, fix)


def _beside(path: Path) -> list[Source]:
    """Files of the trainer's folder, the one above it and those below that it imports."""
    path = path.resolve()
    found: dict[Path, Source] = {}
    waiting = [path]
    while waiting:
        here = waiting.pop()
        for module in _imported(Source.read(here)):
            parts = module.split(".")
            candidates = [
                candidate
                for folder in dict.fromkeys((here.parent, path.parent, path.parent.parent))
                for candidate in (
                    folder.joinpath(*parts, "__init__.py"),
                    *(folder.joinpath(*p).with_suffix(".py") for p in (parts, parts[:-1]) if p),
                )
            ]
            for candidate in candidates:
                if candidate.is_file() and candidate not in found and candidate != path:
                    try:
                        found[candidate] = Source.read(candidate)
                    except ConfigError:
                        continue  # Python 2, say: the trainer itself is what matters
                    waiting.append(candidate)
    return list(found.values())


def _imported(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
