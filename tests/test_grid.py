"""Grids of cells: what is measured again, what is not, and what pages and their rows keep."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import grid
from benchmarks.grid import RESULTS, Grid, read_rows, write_rows
from benchmarks.remedies import CELLS, REMEDIES, config_of, iterations
from ebmguard.errors import ConfigError
from ebmguard.reference_training.sweep.cell import Cell
from tests import forks

STUDIES = ["beta_star", "defaults", "digits", "energy_matching", "remedies", "rollback"]
PAGE = (
    "# Fake\n\n<!-- source -->\n\nold\n\n<!-- /source -->\n\nIt has <!-- sum -->0<!-- /sum -->.\n"
)
# A study whose cells fail where its runs' folder has a file that says so.
FAKE = """
import sys
from benchmarks import grid

def measure(folder, by):
    if (folder.parent / f"no-{folder.name}").exists():
        raise SystemExit(3)
    with (folder / "times").open("a") as file:
        file.write("x")
    return {"twice": 2 * by, "judged": (folder.parent / "judge.json").is_file()}

def slots(rows):
    return {"sum": str(sum(x["twice"] for x in rows))}

cells = {name: {"by": by} for by, name in enumerate("abc")}
FAKE = grid.Grid("fake", cells, measure, slots, {"judge": {"by": 0}})

grid.rules_version = lambda: "8b70a3d2"  # which takes seconds
if __name__ == "__main__":
    sys.exit(FAKE.main())
"""


class Here:
    """Does what a sweep does, in this process."""

    def __init__(self, cells: list[Cell], gpus: list[str], page: Callable[[], None]) -> None:
        self.cells, self.page = cells, page

    def run(self) -> int:
        status = 0
        for cell in self.cells:
            try:
                sys.modules[cell.command[0]].FAKE.main(cell.command[1:])
            except SystemExit as error:
                status = 1
                print(f"FAILED {cell.out.name}: exit status {error.code}, see {cell.log}")
            with contextlib.suppress(ConfigError):  # there is no row yet
                self.page()
        return status


@pytest.mark.parametrize("by", ["here", pytest.param("a sweep", marks=pytest.mark.slow)])
def test_what_is_done_is_kept_and_what_failed_is_measured_again(by, tmp_path, monkeypatch, capsys):
    """Another machine goes on from what lies beside the page."""
    page, runs = tmp_path / "page.md", tmp_path / "runs"
    study = tmp_path / "benchmarks" / "fake.py"  # benchmarks is a namespace: a part of it
    for folder in (study.parent, runs):
        folder.mkdir()
    study.write_text(FAKE)
    page.write_text(PAGE)
    (runs / "no-b").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(grid, "rules_version", str)  # put back in the end
    monkeypatch.delitem(sys.modules, "benchmarks.fake", raising=False)
    fake: Grid = importlib.import_module("benchmarks.fake").FAKE
    monkeypatch.setattr(grid, "Sweep", Here)

    def here(*words: str, runs: Path = runs, status: int = 0) -> str:
        assert fake.main(["--table", str(page), "--runs", str(runs), *words]) == status
        return str(capsys.readouterr().out)

    def swept() -> str:
        if by == "here":
            return here(status=1)
        words = (str(study), "--table", str(page), "--runs", str(runs))
        done = forks.run(*words, PYTHONPATH=f"{tmp_path}:{forks.ROOT}")
        assert done.returncode == 1, done.stderr
        return done.stdout

    for name in "ac":
        here("--cell", name)
    assert f"FAILED b: exit status 3, see {runs / 'b.log'}" in swept()
    assert "It has <!-- sum -->4<!-- /sum -->." in page.read_text()
    assert "; 2 of 3 runs done, each in [page.csv.gz](page.csv.gz)." in page.read_text()
    (runs / "no-b").unlink()
    here("--cell", "b")
    text = here("--table-only")
    rows = read_rows(tmp_path / "page.csv.gz")
    found = [(row["cell"], row["by"], row["twice"], row["judged"]) for row in rows]
    assert found == [("a", 0, 0, False), ("b", 1, 2, True), ("c", 2, 4, False)]
    assert rows[0].keys() >= {"commit", "rules", "date", "machine"}
    assert [len((runs / name / "times").read_text()) for name in ("judge", *"abc")] == [1] * 4
    # Nothing is left: nothing is measured, and the page is that of the rows.
    elsewhere = tmp_path / "elsewhere"
    assert here(runs=elsewhere) == text == f"{page.read_text()}\n"
    assert not elsewhere.exists()
    assert "; 2 of 3 runs done" in here("--table-only", "--again", "a", runs=elsewhere)
    # A cell by its name: the judge is measured there first.
    assert "; 3 of 3 runs done" in here("--only", "a", runs=elsewhere)
    assert sorted(file.name for file in elsewhere.glob("*.json")) == ["a.json", "judge.json"]


def test_rows_are_what_they_were(tmp_path):
    rows = [
        {"cell": "a|b, c", "x": 0.1 + 0.2, "n": 2**60, "of": [1, None, {"β": "–"}], "none": None},
        {"cell": "d", "x": math.inf, "text": "1"},
    ]
    write_rows(tmp_path / "rows.csv.gz", rows)
    assert read_rows(tmp_path / "rows.csv.gz") == rows
    assert read_rows(tmp_path / "no.csv.gz") == []


@pytest.mark.parametrize("name", STUDIES)
def test_a_page_is_that_of_its_rows(name):
    own = importlib.import_module(f"benchmarks.{name}").GRID
    page = RESULTS / f"{name}.md"
    own = dataclasses.replace(own, runs=Path("no runs"), table=page)
    rows = own.rows()
    assert len(rows) == len(own.cells)
    assert own.page_of(rows) == page.read_text(encoding="utf-8")


def test_all_remedies_have_the_compute_of_the_default_steps(tmp_path):
    configs = {name: config_of(tmp_path / name, **own) for name, own in CELLS.items()}
    usual = [configs[name] for name, own in CELLS.items() if not own["longer"]]
    assert (len(usual), len(configs)) == (40, 49)
    for config in usual:
        # A batch of 64 chains for each Langevin step, one of positives and one of negatives.
        spent = config.settings.iterations * (config.settings.sgld_steps + 2)
        budget = 2000 * (5 + 2)
        assert budget - (config.settings.sgld_steps + 2) < spent <= budget
    longer = [configs[name] for name, own in CELLS.items() if own["longer"]]
    assert {config.settings.iterations for config in longer} == {4000, 6000}
    assert iterations({}) == 2000
    assert len({str(config.to_json()) for config in usual[: len(REMEDIES)]}) == len(REMEDIES)
