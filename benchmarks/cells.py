"""Grids of training runs: one process a cell, a few at a time, resumed cell by cell, and a page.

Cells that are done are kept, so that an interrupted grid goes on where it was. The page of results
is written anew after each cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

from ebmguard.reference_training.plots.markdown import markdown_table

from .rules import rules_version, stamp

RESULTS = ("result.json", "results.json", "cell.json")
"""Files in which a cell may say what came of it."""
Row = TypeVar("Row")


class Cell(Protocol):
    """One cell of a grid."""

    @property
    def name(self) -> str:
        """Of its folder, unique in the grid."""

    def command(self, folder: Path) -> Sequence[str]:
        """What runs the cell in `folder`, or goes on with what is there."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """A benchmark that runs cells and writes a page about them.

    Attributes:
        name: of its module.
        cells: in the order in which they are begun.
        page: the lines of the page, of the cells that are done.
        table: where the page is.
        runs: where the cells' folders are.
        run: runs a cell in this process, given the cells' root; None where each has a command.
        judge: a cell that is run before the others.
        kept: whether what came of the cells is kept beside the page as well, in lines of JSON from
            which another machine goes on; for pages that need nothing else of their folders.
    """

    name: str
    cells: Sequence[Any]
    page: Callable[[Path], Sequence[str]]
    table: Path
    runs: Path
    run: Callable[[Any, Path], object] | None = None
    judge: Any = None
    kept: bool = False

    def main(self, words: Sequence[str] | None = None, *own: argparse.ArgumentParser) -> None:
        """Run the cells that are not done, and write the page; `own` are options read before."""
        parser = argparse.ArgumentParser(
            description=f"{self.table.stem}: {len(self.cells)} runs", parents=own
        )
        parser.add_argument("--runs", type=Path, default=self.runs)
        parser.add_argument("--table", type=Path, default=self.table)
        parser.add_argument("--workers", type=int, default=2, help="runs at a time")
        parser.add_argument("--table-only", action="store_true")
        parser.add_argument("--cell", help="run this one only, here, as the grid's processes do")
        given = parser.parse_args(words)
        judges = [] if self.judge is None else [self.judge]
        if given.cell and self.run:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            every = {cell.name: cell for cell in (*judges, *self.cells)}
            self.run(every[given.cell], given.runs)
            return

        beside = given.table.with_suffix(".jsonl") if self.kept else None
        if beside and beside.is_file():
            unpack(beside, given.runs)

        def write() -> None:
            write_page(given.table, self.page(given.runs))
            if beside:
                pack(self.cells, given.runs, beside)

        if not given.table_only:
            run_cells(judges, given.runs)
            run_cells(self.cells, given.runs, workers=given.workers, after=write)
        write()
        print(given.table.read_text(encoding="utf-8"))

    def source(self, root: Path) -> list[str]:
        """What was run, where and when, and under which rules."""
        done = sum(is_done(cell, root) for cell in self.cells)
        file = f"{self.table.stem}.jsonl"
        where = f", each in [{file}]({file})" if self.kept else ""
        return [
            f"Commit {', '.join(commits(root)) or 'none yet'}, {datetime.date.today()}, "
            f"{platform.machine()} CPU, one thread a run on a machine shared with other work, "
            f"`python -m benchmarks.{self.name}`; {done} of {len(self.cells)} runs done{where}.",
            "",
            rules(root),
            "",
        ]


def cell_command(module: str, folder: Path) -> list[str]:
    """Runs one cell of a grid whose cells run in its own process."""
    words = ["--runs", str(folder.parent), "--cell", folder.name]
    return [sys.executable, "-m", f"benchmarks.{module}", *words]


def train_command(trainer: str, folder: Path, *words: str) -> list[str]:
    """Trains, or goes on with what is in the folder."""
    command = [sys.executable, "-m", "ebmguard", "train", trainer, "--out", str(folder)]
    return [*command, *(["--resume"] if (folder / "config.json").is_file() else words)]


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


def load(cells: Iterable[Cell], root: Path) -> list[dict[str, Any]]:
    """Of the cells that are done: the cell and its fields, and what its files say came of it.

    Raises:
        ValueError: a file says otherwise than the cell under the name of a field that is set.
    """
    found: list[dict[str, Any]] = []
    for cell in cells:
        if is_done(cell, root):
            own = dataclasses.asdict(cell).items()  # type: ignore[call-overload]
            files = (root / cell.name / name for name in RESULTS)
            known = [read_json(file) for file in files if file.is_file()]
            result = {k: v for each in known for k, v in each.items()}
            if other := {k: result[k] for k, v in own if v is not None and result.get(k, v) != v}:
                raise ValueError(
                    f"{root / cell.name}: its results say {other}, which is not what {cell} says. "
                    "Give one of the two another name."
                )
            found.append({**dict(own), **result, "cell": cell})
    return found


def pack(cells: Iterable[Cell], root: Path, file: Path) -> None:
    """Write a line of JSON for each cell that is done: what its files say, by their names."""
    lines = []
    for cell in cells:
        if is_done(cell, root):
            names = [f"{cell.name}.done", *(f"{cell.name}/{name}" for name in RESULTS)]
            known = {name: read_json(root / name) for name in names if (root / name).is_file()}
            lines.append(json.dumps(known) + "\n")
    write_text(file, "".join(lines))


def unpack(file: Path, root: Path) -> None:
    """Write the files of the cells in a file of :func:`pack` that are not done here.

    A cell that is to be run again loses its line there, too.
    """
    for line in file.read_text(encoding="utf-8").splitlines():
        (done, mark), *known = json.loads(line).items()
        if not (root / done).is_file():
            folder = root / done.removesuffix(".done")
            folder.mkdir(parents=True, exist_ok=True)
            for name in RESULTS:  # of a run that did not come to its end
                (folder / name).unlink(missing_ok=True)
            for name, value in known:
                write_json(root / name, value)
            write_json(root / done, mark)


def table(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]], words: int = 1) -> str:
    """A Markdown table: a line for each row, whose cells the columns make of it."""
    made = [[cell(row) for cell in columns.values()] for row in rows]
    text: str = markdown_table(list(columns), made, words=words)
    return text


def commits(root: Path) -> list[str]:
    """Of the cells that are done."""
    return sorted({read_json(file)["commit"] for file in root.glob("*.done")})


def rules(root: Path) -> str:
    """The line of a page about the rules under which its cells were run."""
    return stamp(read_json(file).get("rules") for file in root.glob("*.done"))


def commit() -> str:
    """The commit of this code, "-dirty" where a Python file differs from it; or "unknown".

    Pages and results change while a grid runs, and are no part of what it runs.
    """

    def git(*words: str) -> str:
        where = Path(__file__).parent
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=where).stdout

    head = git("rev-parse", "--short", "HEAD").strip()
    changed = git("status", "--porcelain", "--", ":/*.py")
    return f"{head}{'-dirty' if changed else ''}" if head else "unknown"


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write an object to a file."""
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a file that has its name only when all of it is there."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
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
