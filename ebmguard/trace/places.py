"""Places in a user's code: the expression at which a frame stands, from the interpreter itself."""

from __future__ import annotations

import ast
import functools
import operator
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["Place", "Source", "Stack", "shown", "stack", "users_frame"]

_ends = operator.attrgetter("lineno", "end_lineno", "col_offset", "end_col_offset")
# Neither Python's own, nor torch's, nor this package's is the user's; what is installed is.
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_OURS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


@functools.cache
def _is_users(file: str) -> bool:
    if file.startswith(("<", *_OURS)):
        return False
    return not file.startswith(_LIBRARY) or any(part in file for part in _INSTALLED)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, that is the user's."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


class Source:
    """A file as text and as a tree that knows its parents. OSError or SyntaxError if unreadable."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.text = Path(file).read_text()
        self.tree = ast.parse(self.text)
        self._parents = {
            child: parent
            for parent in ast.walk(self.tree)
            for child in ast.iter_child_nodes(parent)
        }

    @staticmethod
    @functools.cache
    def of(file: str) -> Source:
        """The same source for the same file."""
        return Source(file)

    def around(self, node: ast.AST) -> list[ast.AST]:
        """What the node is part of, from the inside out."""
        above = self._parents.get(node)
        return [] if above is None else [above, *self.around(above)]

    def offset(self, line: int, column: int) -> int:
        """Bytes before a place: its line from 1, its column in bytes."""
        before = self.text.splitlines(keepends=True)[: line - 1]
        return len("".join(before).encode()) + column

    def segment(self, node: ast.AST) -> str:
        """The text of a node."""
        return ast.get_source_segment(self.text, node) or ""


@dataclass(frozen=True)
class Place:
    """An instruction of the user's code."""

    code: CodeType
    instruction: int

    def __hash__(self) -> int:
        return hash((id(self.code), self.instruction))  # A code object would hash all of itself.

    @property
    def file(self) -> str:
        """The path of its file."""
        return self.code.co_filename

    @property
    def _span(self) -> tuple[int, ...]:
        """First and last line from 1, first and last column in bytes; zeros where unknown."""
        return tuple(each or 0 for each in list(self.code.co_positions())[self.instruction // 2])

    @property
    def source(self) -> Source:
        """Its file."""
        return Source.of(self.file)

    @property
    def node(self) -> ast.expr | None:
        """The expression that is being evaluated there; None where it is a statement."""
        span, all_nodes = self._span, ast.walk(self.source.tree)
        return next((e for e in all_nodes if isinstance(e, ast.expr) and _ends(e) == span), None)

    @property
    def statement(self) -> ast.stmt:
        """The innermost statement around it."""
        line = self._span[0]
        found = [each for each in ast.walk(self.source.tree) if isinstance(each, ast.stmt)]
        # From the outside in.
        return [each for each in found if each.lineno <= line <= (each.end_lineno or line)][-1]

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self._span[0]}"

    @property
    def text(self) -> str:
        """Its statement on one line, cut where it is long."""
        try:
            line = ast.unparse(self.statement).splitlines()[0]
        except (OSError, SyntaxError, LookupError):
            return "?"
        return line if len(line) <= 100 else line[:97] + "..."


# The user's frames, the innermost first, each with where it stood then.
Stack = tuple[tuple[FrameType, Place], ...]


def stack(frame: FrameType | None) -> Stack:
    """The user's frames from this one outwards."""
    frame = users_frame(frame)
    if frame is None:
        return ()
    return ((frame, Place(frame.f_code, frame.f_lasti)), *stack(frame.f_back))


def shown(file: str) -> str:
    """A path as short as it can be said from here."""
    short = os.path.relpath(file)
    return file if short.startswith(".." + os.sep + "..") else short
