"""Grids of training runs: one process a cell, a few at a time, resumed cell by cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from .rules import rules_version, stamp


class Cell(Protocol):
    """One cell of a grid."""

    @property
    def name(self) -> str:
        """Of its folder, unique in the grid."""

    def command(self, folder: Path) -> Sequence[str]:
        """What runs the cell in `folder`, or goes on with what is there."""


def run_cells(
    cells: Sequence[Cell],
    root: Path,
    *,
    workers: int = 2,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Run the cells that are not done, each as a process of its own.

    A cell is done when its command has ended well; ROOT/NAME.done then holds its commit. What it
    prints goes to ROOT/NAME.log. A cell that fails leaves the others alone.

    Args:
        cells: in the order in which they are begun.
        root: where the cells' folders lie.
        workers: cells at a time.
        after: called after each cell, such as to write the table anew; never twice at a time.

    Raises:
        SystemExit: cells have failed; the others are done.
    """
    root.mkdir(parents=True, exist_ok=True)
    one_at_a_time = Lock()
    failed: list[str] = []

    def work(cell: Cell) -> None:
        if is_done(cell, root):
            return
        log = root / f"{cell.name}.log"
        with log.open("w", encoding="utf-8") as out:
            command = list(cell.command(root / cell.name))
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
        with one_at_a_time:
            if status:
                failed.append(f"{cell.name}: exit status {status}, see {log}")
                print(failed[-1], file=sys.stderr, flush=True)
                return
            write_json(root / f"{cell.name}.done", {"commit": commit(), "rules": rules_version()})
            print(f"{cell.name}: done", flush=True)
            after()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, cells))
    if failed:
        raise SystemExit("some cells failed; run the command again:\n  " + "\n  ".join(failed))


def is_done(cell: Cell, root: Path) -> bool:
    """Whether the cell has been run to its end."""
    return (root / f"{cell.name}.done").is_file()


def commits(root: Path) -> list[str]:
    """Of the cells that are done."""
    return sorted({read_json(file)["commit"] for file in root.glob("*.done")})


def rules(root: Path) -> str:
    """The line of a page about the rules under which its cells were run."""
    return stamp(read_json(file).get("rules") for file in root.glob("*.done"))


def commit() -> str:
    """The commit of this code, or "unknown"."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return run.stdout.strip() or "unknown"


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a file that has its name only when all of it is there."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file."""
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return value


def write_page(target: Path, lines: Sequence[str]) -> None:
    """Write a page of results; what stands below the line `<!-- notes -->` in it is kept."""
    old = target.read_text(encoding="utf-8") if target.is_file() else ""
    notes = old.partition(NOTES)[2] or "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines) + f"\n{NOTES}{notes}", encoding="utf-8")


NOTES = "<!-- notes -->"


def number(value: Any, form: str = ".3g") -> str:
    """A number of a table; a dash where there is none."""
    return "–" if value is None else format(float(value), form)


def percent(value: Any) -> str:
    """A share of a table; a dash where there is none."""
    return "–" if value is None else f"{100 * float(value):.1f}%"
