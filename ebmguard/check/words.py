"""Problems for people: grouped by how bad they are, in plain text or, with rich, in colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ..alerts import Level
from .problem import Problem

__all__ = ["show", "to_text"]

_HEADS = {
    Level.ERROR: ("error", "errors"),
    Level.WARN: ("warning", "warnings"),
    Level.INFO: ("note", "notes"),
}
_COLOURS = {Level.ERROR: "bold red", Level.WARN: "yellow", Level.INFO: "cyan"}
_WIDTH = 100


def to_text(problems: Sequence[Problem], *, width: int = _WIDTH) -> str:
    """The problems in groups, worst first."""
    if not problems:
        return "no problems found"
    return "\n".join(text for text, _ in _lines(problems, width))


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
    if not problems:
        console.print("no problems found", style="green")
    for text, style in _lines(problems, min(console.width, _WIDTH)):
        console.print(Text(text, style=style))


def _lines(problems: Sequence[Problem], width: int) -> list[tuple[str, Any]]:
    lines: list[tuple[str, Any]] = []

    def wrapped(text: str, first: str, rest: str, style: str) -> None:
        folded = textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.extend((line, style) for line in folded)

    for level in sorted(_HEADS, reverse=True):
        group = [problem for problem in problems if problem.severity is level]
        if not group:
            continue
        if lines:
            lines.append(("", ""))
        one, many = _HEADS[level]
        lines.append((f"{len(group)} {one if len(group) == 1 else many}", _COLOURS[level]))
        for problem in group:
            lines.append((f"  {problem.where}  {problem.name}", "bold"))
            wrapped(problem.what, "    ", "    ", "")
            wrapped(problem.fix, "    fix: ", "         ", "green")
    return lines
