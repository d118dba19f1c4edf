"""Grids of cells, each measured in a process of its own: rows in one frame, tables in one page.

A study names its cells, what measures one, and what its page shows of their rows. They are run as
`ebmguard sweep` runs its own; what is done is kept. The page is written by hand but for its slots,
`<!-- NAME --> ... <!-- /NAME -->`, which are filled anew after each cell; the rows lie beside it,
so that another machine goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from scipy.stats import binomtest

from ebmguard.cli import main as ebmguard
from ebmguard.errors import ConfigError
from ebmguard.reference_training.device import describe
from ebmguard.reference_training.engine.run_folder import read_json, write_text
from ebmguard.reference_training.plots.numbers import NONE, markdown_table
from ebmguard.reference_training.sweep.cell import Cell
from ebmguard.reference_training.sweep.sweep import Sweep

from .rules import rules_version, stamp

RESULTS = Path("docs/results")
SLOT = re.compile(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", re.DOTALL)
Row = TypeVar("Row")
Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A study.

    Attributes:
        name: of its module.
        cells: by name, in the order in which they are begun: the settings of each.
        measure: gets a folder for a cell and its settings; returns what came of it, as JSON.
        slots: text for each slot of the page but "source", from the rows of the cells that are
            done; a row has the settings of its cell and what came of it.
        judge: cells by name that are measured before the others, which need their folders; they
            have no rows in the frame.
        runs: the cells' folder, as the command line has it.
        table: the page.
    """

    name: str
    cells: Mapping[str, Mapping[str, Any]]
    measure: Callable[..., Mapping[str, Any]]
    slots: Callable[[Rows], Mapping[str, str]]
    judge: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    runs: Path = Path()
    table: Path = Path()

    def main(self, words: Sequence[str] | None = None) -> int:
        """The command: measure what is not done, and fill the page; returns the exit status."""
        parser = argparse.ArgumentParser(description=f"{self.name}: {len(self.cells)} cells")
        parser.add_argument("--runs", type=Path, default=Path("runs") / self.name)
        parser.add_argument("--table", type=Path, default=RESULTS / f"{self.name}.md")
        parser.add_argument("--workers", type=int, default=2, help="cells at a time")
        parser.add_argument("--table-only", action="store_true", help="measure nothing")
        parser.add_argument("--only", default="", help="only cells whose name contains this")
        parser.add_argument("--again", nargs="+", default=[], help="cells whose rows do not count")
        parser.add_argument(
            "--cell", choices=[*self.judge, *self.cells], help="this one, in this process"
        )
        given = parser.parse_args(words)
        own, status = dataclasses.replace(self, runs=given.runs, table=given.table), 0
        if given.cell:
            torch.set_num_threads(1)
            own.measure_cell(given.cell)
            return 0
        own.forget(given.again)
        done = {row["cell"] for row in own.rows()}
        left = [name for name in self.cells if name not in done and given.only in name]
        for names in (self.judge, left) if left and not given.table_only else ():
            if names and not status:
                cells = [own.cell(name) for name in names]
                status = Sweep(cells, [""] * given.workers, own.page).run()
        try:
            own.page()
        except ConfigError as error:
            raise SystemExit(str(error)) from error
        print(given.table.read_text(encoding="utf-8"))
        return status

    def cell(self, name: str) -> Cell:
        """A cell, as a sweep sees it."""
        own = ("--runs", str(self.runs), "--cell", name)
        return Cell(self.runs / name, (f"benchmarks.{self.name}", *own))

    @property
    def store(self) -> Path:
        """The rows of all cells that are done."""
        return self.table.with_suffix(".csv.gz")

    def measure_cell(self, name: str) -> None:
        """Measure a cell, and write its row."""
        cell, settings = self.cell(name), {**self.judge, **self.cells}[name]
        cell.out.mkdir(parents=True, exist_ok=True)
        where = {"date": str(datetime.date.today()), "machine": f"{platform.machine()} CPU"}
        made = {"cell": name, "commit": commit(), "rules": rules_version(), **where}
        row = {**self.measure(cell.out, **settings), **settings, **made}
        write_text(cell.row, json.dumps(row, indent=2) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Of the cells that are done, in the grid's order."""
        kept = {row["cell"]: row for row in read_rows(self.store)}
        new = (self.cell(name).row for name in self.cells)
        kept |= {file.stem: read_json(file) for file in new if file.is_file()}
        return [kept[name] for name in self.cells if name in kept]

    def forget(self, names: Sequence[str]) -> None:
        """Take the rows of cells away, so that they are measured again."""
        for name in names:
            self.cell(name).row.unlink(missing_ok=True)
        if names:
            write_rows(self.store, [x for x in read_rows(self.store) if x["cell"] not in names])

    def page(self) -> None:
        """Keep the rows, and fill the page's slots from them.

        Raises:
            ConfigError: there are none, and the page stays as it is.
        """
        rows = self.rows()
        if not rows:
            raise ConfigError(f"nothing is known yet: no rows in {self.store} or {self.runs}")
        write_rows(self.store, rows)
        write_text(self.table, self.page_of(rows))

    def page_of(self, rows: Rows) -> str:
        """The page with its slots filled from the rows.

        Its "source" is what was measured, where and when, and under which rules.
        """
        commits, machines = (
            ", ".join(sorted({x[of] for x in rows})) for of in ("commit", "machine")
        )
        source = (
            f"Commit {commits}, {max(x['date'] for x in rows)}, {machines}, one thread a run on a "
            f"machine shared with other work, `python -m benchmarks.{self.name}`; {len(rows)} "
            f"of {len(self.cells)} runs done, each in [{self.store.name}]({self.store.name})."
            f"\n\n{stamp(x['rules'] for x in rows)}"
        )
        text = self.table.read_text(encoding="utf-8")
        return filled(text, {"source": source, **self.slots(rows)})


def filled(text: str, slots: Mapping[str, str], *, whole: bool = True) -> str:
    """A page with these texts in its slots; what has several lines stands apart from its marks.

    Raises:
        ValueError: the page has other slots; or lacks one, where not the whole page is filled.
    """
    names = SLOT.findall(text)
    if sorted(names) != sorted(slots) and (whole or not slots.keys() <= set(names)):
        raise ValueError(f"the page has slots for {sorted(names)}, and there are {sorted(slots)}")

    def slot(found: re.Match[str]) -> str:
        if found[1] not in slots:
            return found[0]
        own = slots[found[1]]
        if "\n" in own or "\n" in found[0]:
            own = f"\n\n{own}\n\n"
        return f"<!-- {found[1]} -->{own}<!-- /{found[1]} -->"

    return SLOT.sub(slot, text)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of :func:`write_rows`; none where there is no file."""
    if not file.is_file():
        return []
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    return [
        {name: json.loads(value) for name, value in row.items() if value}
        for row in frame.to_dict("records")
    ]


def write_rows(file: Path, rows: Rows) -> None:
    """Write a compressed frame whose entries are JSON; what a row lacks is empty."""
    frame = pd.DataFrame(
        [{name: json.dumps(x, ensure_ascii=False) for name, x in row.items()} for row in rows]
    )
    partial = file.with_name(f"{file.name}.partial")
    frame.to_csv(partial, index=False, compression={"method": "gzip", "mtime": 0})
    os.replace(partial, file)


def trained(trainer: str, folder: Path, *words: str) -> dict[str, Any]:
    """Train in this process, or go on with what is in the folder; the run's results."""
    begun = (folder / "config.json").is_file()
    words = ("--resume",) if begun else words
    if status := ebmguard(["train", trainer, "--out", str(folder), *words]):
        raise SystemExit(status)
    results: dict[str, Any] = read_json(folder / "results.json")
    return results


def table(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]], words: int = 1) -> str:
    """A Markdown table: a line for each row, whose cells the columns make of it."""
    made = [[cell(row) for cell in columns.values()] for row in rows]
    return markdown_table(list(columns), made, words=words) if made else "None yet."


def table_of(lines: Sequence[Mapping[str, str]], words: int = 1) -> str:
    """A Markdown table of lines that have the same columns."""
    return table(lines, {name: itemgetter(name) for name in lines[0]} if lines else {}, words)


def commit() -> str:
    """The commit of this code, "-dirty" where a Python file differs from it; or "unknown".

    Pages and results change while a grid runs, and are no part of what it runs.
    """

    def git(*words: str) -> str:
        where = Path(__file__).parent
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=where).stdout

    if not shutil.which("git"):
        return "unknown"
    head = git("rev-parse", "--short", "HEAD").strip()
    changed = git("status", "--porcelain", "--", ":/*.py")
    return f"{head}{'-dirty' if changed else ''}" if head else "unknown"


def provenance(device: torch.device, command: Sequence[str]) -> str:
    """What ran, where and when."""
    return (
        f"Commit {commit()}, {describe(device)}, torch {torch.__version__}, "
        f"{datetime.date.today():%d %B %Y}: `{shlex.join(command)}`"
    )


def number(value: Any, form: str = ".3g") -> str:
    """A number of a table; a dash where there is none, or it is NaN."""
    return NONE if pd.isna(value) else format(float(value), form)


def percent(value: Any) -> str:
    """A share of a table; a dash as for a number."""
    return NONE if pd.isna(value) else f"{100 * float(value):.1f}%"


def rate(k: int, n: int) -> str:
    """How many of how many, with the exact interval of the rate (Clopper and Pearson, 95%)."""
    low, high = binomtest(k, n).proportion_ci()
    return f"{k} of {n} ({low:.2f} to {high:.2f})"
