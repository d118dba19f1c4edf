"""The command line. Each command is a settings dataclass and the function that it is given to.

Nothing is imported before the command is known: neither tyro, which only the command line needs,
nor the module of another command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import EbmguardError

__all__ = ["COMMANDS", "Command", "main"]

USAGE_ERROR = 2


@dataclass(frozen=True)
class Command:
    """Where a command lives.

    Attributes:
        config: "module:name" of the settings, a dataclass whose docstrings are the help.
        run: "module:name" of a function that takes the settings and returns the exit status.
        summary: one line for the list of commands.
    """

    config: str
    run: str
    summary: str


COMMANDS: dict[tuple[str, ...], Command] = {
    ("train", "jem"): Command(
        config="ebmguard.reference_training.jem.config:JemConfig",
        run="ebmguard.reference_training.jem.command:run",
        summary="train a joint energy-based model, watched by the guard",
    ),
    ("train", "toy"): Command(
        config="ebmguard.reference_training.toy.config:ToyConfig",
        run="ebmguard.reference_training.toy.command:run",
        summary="train ensembles of small EBMs on densities that are known",
    ),
    ("figure",): Command(
        config="ebmguard.reference_training.toy.figures.config:FigureConfig",
        run="ebmguard.reference_training.toy.figures.command:run",
        summary="a toy figure of the paper: train what it needs, draw it, print its numbers",
    ),
    ("compare",): Command(
        config="ebmguard.report.compare:CompareConfig",
        run="ebmguard.report.compare:compare",
        summary="draw runs side by side",
    ),
    ("demo",): Command(
        config="ebmguard.reference_training.demo:DemoConfig",
        run="ebmguard.reference_training.demo:run",
        summary="the same JEM run without and with the guard",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after the program's name; None takes those of the process.

    Returns:
        Exit status: 0, 2 for a command line or settings that cannot be meant, or the command's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((name for name in COMMANDS if tuple(words[: len(name)]) == name), None)
    if name is None:
        wanted_help = bool(words) and words[0] in ("-h", "--help")
        print(usage(), file=sys.stdout if wanted_help else sys.stderr)
        return 0 if wanted_help else USAGE_ERROR
    try:
        import tyro
    except ImportError:
        print('the command line needs tyro: pip install "ebmguard[train]"', file=sys.stderr)
        return USAGE_ERROR
    command = COMMANDS[name]
    try:
        config = tyro.cli(
            load(command.config), prog=" ".join(("ebmguard", *name)), args=words[len(name) :]
        )
        status: int = load(command.run)(config)
    except (EbmguardError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return status


def load(location: str) -> Any:
    """The object that "module:name" stands for."""
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


def usage() -> str:
    """The list of commands."""
    lines = ["usage: ebmguard COMMAND [options]", "", "commands:"]
    lines += [f"  {' '.join(name):12} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "ebmguard COMMAND --help lists the options of a command."]
    return "\n".join(lines)
