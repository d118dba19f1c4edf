"""Tables that are Markdown, and lie in columns in a terminal too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"
"""What stands where there is no number."""


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A table whose columns are as wide as their widest cell.

    Args:
        head: titles of the columns.
        rows: as many cells each.
        words: columns, from the left, that hold words; the others are ranged right.
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        [f"{cell:{'<' if i < words else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        for row in cells
    ]
    rule = ["-" * width if i < words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines.insert(1, rule)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(what: str, columns: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of named rows.

    Args:
        what: title of the names.
        columns: formats of a row's numbers by the title of their column.
        rows: by name.
    """
    forms = columns.values()
    cells = [(name, *(form.format(**row) for form in forms)) for name, row in rows.items()]
    return markdown_table((what, *columns), cells)
