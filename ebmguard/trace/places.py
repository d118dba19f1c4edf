"""Places in a user's code: the expression at which a frame stands, from the interpreter itself."""

from __future__ import annotations

import ast
import functools
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["Place", "Source", "Stack", "is_users", "shown", "stack", "users_frame"]

# A frame, and the instruction at which it stood then.
Stack = tuple[tuple[FrameType, int], ...]
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_NOT_USERS = tuple(str(Path(f).parent) + os.sep for f in (torch.__file__, __file__))
_ENDS = ("lineno", "end_lineno", "col_offset", "end_col_offset")
_OURS = str(Path(__file__).parents[1])


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is neither Python's own, nor torch's, nor that of this package."""
    if file.startswith(("<", _OURS + os.sep, *_NOT_USERS)):
        return False
    return not file.startswith(_LIBRARY) or any(part in file for part in _INSTALLED)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, that is the user's."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def stack(frame: FrameType | None) -> Stack:
    """The user's frames from this one outwards."""
    found = []
    while (frame := users_frame(frame)) is not None:
        found.append((frame, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


class Source:
    """A file as text and as a tree that knows its parents. OSError or SyntaxError if unreadable."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.text = Path(file).read_text()
        self._lines = self.text.splitlines(keepends=True)
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
        found = []
        while (above := self._parents.get(node)) is not None:
            found.append(above)
            node = above
        return found

    def offset(self, line: int, column: int) -> int:
        """Bytes before a place: its line from 1, its column in bytes."""
        return sum(len(each.encode()) for each in self._lines[: line - 1]) + column

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

    @staticmethod
    def at(call: tuple[FrameType, int]) -> Place:
        """Of one entry of a stack."""
        return Place(call[0].f_code, call[1])

    @staticmethod
    def of(frame: FrameType) -> Place:
        """Where a frame stands now."""
        return Place(frame.f_code, frame.f_lasti)

    @property
    def file(self) -> str:
        """The path of its file."""
        return self.code.co_filename

    @property
    def span(self) -> tuple[int, int, int, int]:
        """First and last line from 1, first and last column in bytes; zeros where unknown."""
        found = _spans(self.code)[self.instruction // 2]
        return tuple(each or 0 for each in found)  # type: ignore[return-value]

    @property
    def source(self) -> Source:
        """Its file."""
        return Source.of(self.file)

    @property
    def node(self) -> ast.expr | None:
        """The expression that is being evaluated there; None where it is a statement."""
        for each in ast.walk(self.source.tree):
            ends = (getattr(each, name, None) for name in _ENDS)
            if isinstance(each, ast.expr) and tuple(ends) == self.span:
                return each
        return None

    @property
    def statement(self) -> ast.stmt:
        """The innermost statement around it."""
        line = self.span[0]
        found = [each for each in ast.walk(self.source.tree) if isinstance(each, ast.stmt)]
        return min(
            (each for each in found if each.lineno <= line <= (each.end_lineno or line)),
            key=lambda each: ((each.end_lineno or each.lineno) - each.lineno, -each.col_offset),
        )

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.span[0]}"

    @property
    def text(self) -> str:
        """Its statement on one line, cut where it is long."""
        try:
            line = ast.unparse(self.statement).splitlines()[0]
        except (OSError, SyntaxError, ValueError):
            return "?"
        return line if len(line) <= 100 else line[:97] + "..."


def shown(file: str) -> str:
    """A path as short as it can be said from here."""
    short = os.path.relpath(file)
    return file if short.startswith(".." + os.sep + "..") else short


_spans = functools.cache(lambda code: list(code.co_positions()))
