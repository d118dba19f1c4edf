"""The site's search is for the manual: results stay out of it. Data files become tables."""

import csv
import re
from pathlib import Path
from typing import Any

SOME = ("reference/api/", "training.md", "shortrun.md", "toys.md", "bism.md")
TABLE = re.compile(r"^<!-- table: ([\w.-]+) -->$", re.MULTILINE)


def tables(file: Path) -> str:
    """A data file as Markdown: a heading and a table for each entry of its first column."""
    with file.open(encoding="utf-8", newline="") as opened:
        (_, *names), *rows = csv.reader(opened)
    lines, section = [], ""
    for first, *cells in rows:
        if first != section:
            section = first
            lines += ["", f"## {first}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Called by mkdocs for each page before it is drawn."""
    file = Path(page.file.abs_src_path)
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("search", {"exclude": True})
    elif page.file.src_uri.startswith(SOME):
        page.meta.setdefault("search", {"boost": 0.4})  # below 1 / e it would count as negative
    return TABLE.sub(lambda found: tables(file.parent / found[1]), markdown)
