"""Tables that are Markdown, and lie in columns in a terminal too."""

from __future__ import annotations

from collections.abc import Sequence

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
