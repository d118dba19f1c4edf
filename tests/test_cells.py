"""Grids of cells: what is run again, what is not, and what the pages keep."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from benchmarks import cells, digits
from benchmarks.cells import (
    NOTES,
    Grid,
    commits,
    is_done,
    load,
    read_json,
    run_cells,
    table,
    write_json,
    write_page,
)
from benchmarks.remedies_cell import REMEDIES, best, grid, iterations


@dataclass(frozen=True)
class Fake:
    """Appends a line to a file of its own; fails if told so."""

    name: str
    fails: bool = False

    def command(self, folder: Path) -> Sequence[str]:
        program = "import sys, pathlib; folder = pathlib.Path(sys.argv[1]); folder.mkdir("
        program += "exist_ok=True); (folder / 'runs').open('a').write('x'); print('said'); sys.exit"
        return [sys.executable, "-c", f"{program}({3 * self.fails})", str(folder)]


def times(root: Path, name: str) -> int:
    file = root / name / "runs"
    return len(file.read_text()) if file.is_file() else 0


def test_cells_that_are_done_are_kept_and_failed_ones_are_run_again(tmp_path):
    root, tables = tmp_path / "grid", []
    cells = [Fake("a"), Fake("b", fails=True), Fake("c")]
    with pytest.raises(SystemExit, match="b: exit status 3"):
        run_cells(cells, root, after=lambda: tables.append([is_done(c, root) for c in cells]))
    assert len(tables) == 2  # one for each that is done
    assert [is_done(cell, root) for cell in cells] == [True, False, True]
    assert (root / "a.log").read_text().strip() == "said"
    assert read_json(root / "a.done").keys() == {"commit", "rules"}
    assert len(commits(root)) == 1
    run_cells([Fake("a"), Fake("b"), Fake("c")], root, workers=1)
    assert [times(root, name) for name in "abc"] == [1, 2, 1]


def test_a_grid_runs_its_judge_first_and_its_page_has_what_is_done(tmp_path, capsys):
    root, seen = tmp_path / "grid", []

    def page(root: Path) -> list[str]:
        seen.append([row["name"] for row in load(small.cells, root)])
        columns = {"name": lambda row: row["name"], "runs | read": lambda row: str(row["runs"])}
        return [*small.source(root), table(load(small.cells, root), columns)]

    def run(cell: Fake, root: Path) -> None:
        write_json(root / cell.name / "result.json", {"runs": times(root, cell.name)})

    cells, judge = [Fake("a"), Fake("b")], Fake("judge")
    small = Grid("fake", cells, page, tmp_path / "page.md", root, run, judge, kept=True)
    for cell in cells:
        (root / cell.name).mkdir(parents=True)
        small.main(["--cell", cell.name])
    small.main(["--workers", "1"])
    assert seen == [["a"], ["a", "b"], ["a", "b"]]
    assert is_done(judge, root)
    text = (tmp_path / "page.md").read_text()
    assert "benchmarks.fake`; 2 of 2 runs done, each in [page.jsonl](page.jsonl)." in text
    assert "| name | runs \\| read |" in text
    assert "| b    |            0 |" in text
    assert capsys.readouterr().out.endswith(f"{text}\n")
    # Another machine goes on from what lies beside the page.
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "b").mkdir(parents=True)
    write_json(elsewhere / "b" / "results.json", {"runs": 7})  # begun there and not ended
    small.main(["--table-only", "--runs", str(elsewhere)])
    assert (tmp_path / "page.md").read_text() == text
    assert load(cells, elsewhere) == load(cells, root)
    write_json(root / "b" / "result.json", {"runs": 0, "name": "c"})
    with pytest.raises(ValueError, match=r"b: its results say \{'name': 'c'\}"):
        load(small.cells, root)


def test_the_commit_of_a_cell_is_dirty_by_code_and_not_by_pages(tmp_path, monkeypatch):
    code, page = tmp_path / "benchmarks" / "cells.py", tmp_path / "page.md"
    code.parent.mkdir()
    for file in (code, page):
        file.write_text("first")
    monkeypatch.setattr(cells, "__file__", str(code))

    def git(*words: str) -> str:
        own = ("git", "-c", "user.name=A", "-c", "user.email=a@b.c", *words)
        return subprocess.run(own, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init")
    assert cells.commit() == "unknown"
    git("add", ".")
    git("commit", "-m", "first")
    head = git("rev-parse", "--short", "HEAD").strip()
    page.write_text("second")
    assert cells.commit() == head
    code.write_text("second")
    assert cells.commit() == f"{head}-dirty"


def test_what_people_wrote_below_a_table_stays(tmp_path):
    page = tmp_path / "docs" / "page.md"
    write_page(page, ["# Title", "", "old"])
    assert page.read_text().endswith(f"{NOTES}\n")
    page.write_text(page.read_text() + "\nWhat it means.\n")
    write_page(page, ["# Title", "", "new"])
    assert page.read_text() == f"# Title\n\nnew\n{NOTES}\n\nWhat it means.\n"


def test_all_remedies_have_the_compute_of_the_default_steps(tmp_path):
    judge, cells, longer = grid()
    assert len(cells) == 40
    assert len({cell.name for cell in [judge, *cells, *longer]}) == 1 + 40 + 9
    for cell in cells:
        settings = cell.config(tmp_path / cell.name).settings
        # A batch of 64 chains for each Langevin step, one of positives and one of negatives.
        spent = settings.iterations * (settings.sgld_steps + 2)
        budget = 2000 * (5 + 2)
        assert budget - (settings.sgld_steps + 2) < spent <= budget
    steps = {cell.config(tmp_path / cell.name).settings.iterations for cell in longer}
    assert steps == {4000, 6000}
    assert iterations({}) == 2000
    changed = [cell.config(tmp_path / cell.name) for cell in cells[: len(REMEDIES)]]
    assert len({str(config.to_json()) for config in changed}) == len(REMEDIES)


def test_the_best_that_samples_ever_were_is_of_looks_in_a_row(tmp_path):
    def measure(x: Tensor) -> dict[str, Any]:
        return {"fid": float((x.mean() - 1) ** 2), "is": float(x.mean())}

    (tmp_path / "samples").mkdir()
    assert best(tmp_path, measure) == {"best_fid": None, "best_is": None}
    for step, byte in enumerate([0, 255, 255, 255, 255, 0, 0, 255]):  # -1 and 1
        np.save(tmp_path / "samples" / f"{50 * step:08d}.npy", np.full((2, 1, 3, 3), byte, "u1"))
    # Four of five are 1 at best.
    found = best(tmp_path, measure)
    assert found == pytest.approx({"best_fid": (0.6 - 1) ** 2, "best_is": 0.6})


def test_a_run_on_digits_keeps_the_medians_of_its_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "MARKS", (3, 5, 20))
    monkeypatch.setattr(digits, "WINDOW", 3)
    cell = digits.Cell(0.5, 0, 6)
    digits.run(cell, tmp_path)
    lines = (tmp_path / cell.name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    gaps = [abs(json.loads(line)["energy_gap"]) for line in lines]
    kept = read_json(tmp_path / cell.name / "cell.json")["gaps"]
    assert kept == {"3": sorted(gaps[:3])[1], "5": sorted(gaps[2:5])[1]}
