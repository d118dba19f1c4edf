"""A Python file as a tree with parents, scopes, and what names are assigned."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import ConfigError

__all__ = ["FUNCTIONS", "Assigned", "Function", "Source", "name_of"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Assigned:
    """One assignment of a name.

    Attributes:
        line: where.
        value: what is assigned; of ``a, b = f()`` the whole right side.
        scope: the function it is in, None at module level.
    """

    line: int
    value: ast.expr
    scope: Function | None


class Source:
    """A parsed file.

    Args:
        path: the file, for words.
        text: its content.

    Raises:
        ConfigError: it is not Python.
    """

    def __init__(self, path: Path, text: str) -> None:
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise ConfigError(
                f"{path} is not Python 3 that can be read: {error}. Expected the file of a trainer."
            ) from error
        self.path = path
        self.text = text
        self.lines = text.splitlines()
        self.parents: dict[ast.AST, ast.AST] = {
            child: parent
            for parent in ast.walk(self.tree)
            for child in ast.iter_child_nodes(parent)
        }

    @classmethod
    def read(cls, path: Path) -> Source:
        """Parse a file.

        Raises:
            ConfigError: it cannot be read, or is not Python.
        """
        try:
            return cls(path, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}.") from error

    def where(self, node: ast.AST) -> str:
        """``file:line``."""
        return f"{self.path.name}:{getattr(node, 'lineno', 1)}"

    def line(self, node: ast.AST) -> str:
        """The line of a node, without its indentation."""
        return self.lines[getattr(node, "lineno", 1) - 1].strip()

    def code(self, node: ast.AST) -> str:
        """The code of a node as it is written, on one line."""
        found = ast.get_source_segment(self.text, node)
        return " ".join((found or ast.unparse(node)).split())

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: ast.AST) -> Function | None:
        """The function that a node is in."""
        return next((each for each in self.above(node) if isinstance(each, FUNCTIONS)), None)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The statement that a node is part of."""
        chain = [node, *self.above(node)]
        return next((each for each in chain if isinstance(each, ast.stmt)), None)

    @cached_property
    def all_calls(self) -> list[ast.Call]:
        """Every call, in the file's order."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Calls of functions or methods by the last part of their name, in the file's order."""
        for call in self.all_calls:
            func = call.func
            if (func.attr if isinstance(func, ast.Attribute) else name_of(func)) in names:
                yield call

    @cached_property
    def assigned(self) -> dict[str, list[Assigned]]:
        """What each name or dotted name is assigned, in the file's order."""
        found: dict[str, list[Assigned]] = {}

        def note(target: ast.expr, value: ast.expr, line: int, scope: Function | None) -> None:
            if isinstance(target, ast.Tuple | ast.List):
                parts = value.elts if isinstance(value, ast.Tuple | ast.List) else None
                for i, each in enumerate(target.elts):
                    own = parts[i] if parts and len(parts) == len(target.elts) else value
                    note(each, own, line, scope)
            elif name := name_of(target):
                found.setdefault(name, []).append(Assigned(line, value, scope))

        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    note(target, node.value, node.lineno, self.function(node))
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                note(node.target, node.value, node.lineno, self.function(node))
        for each in found.values():
            each.sort(key=lambda assigned: assigned.line)
        return found

    def value_at(self, name: str, node: ast.AST) -> ast.expr | None:
        """What a name was assigned last above a node, in its function or at module level."""
        line = getattr(node, "lineno", 0)
        scopes: list[Function | None] = [
            each for each in self.above(node) if isinstance(each, FUNCTIONS)
        ]
        for scope in (*scopes, None):
            own = [each for each in self.assigned.get(name, []) if each.scope is scope]
            before = [each for each in own if each.line < line]
            if before:
                return before[-1].value
            if own and scope is None:
                return own[-1].value
        return None


def name_of(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = name_of(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
