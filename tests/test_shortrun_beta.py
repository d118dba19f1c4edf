"""The grid of β* on short-run training: its commands are commands, its table what runs did."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from benchmarks import shortrun_beta
from benchmarks.cells import write_json
from benchmarks.shortrun_beta import CELLS, Cell, measure, page
from ebmguard.reference_training.data import ROOT_VARIABLE
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.train import train as train_jem
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import train as train_shortrun

TRAINERS: dict[str, tuple[Any, Any]] = {
    "jem": (JemConfig, train_jem),
    "shortrun": (ShortRunConfig, train_shortrun),
}


def words_of(cell: Cell, folder: Path) -> Sequence[str]:
    words = list(cell.command(folder))
    assert words[:4] == [sys.executable, "-m", "ebmguard", "train"]
    return words[4:]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_cell_is_a_run_that_can_be_resumed(cell, tmp_path):
    name, *options = words_of(cell, tmp_path / "new")
    config = tyro.cli(TRAINERS[name][0], args=options)
    assert config.out == tmp_path / "new"
    assert config.data == cell.data
    if cell.beta_star is None:
        assert config.p_x_weight == 0
    else:
        assert (config.beta_star, config.most_steps) == (cell.beta_star, cell.most_steps)
    (tmp_path / "config.json").touch()
    assert words_of(cell, tmp_path) == [name, "--out", str(tmp_path), "--resume"]


def test_names_are_unique():
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_the_page_shows_what_the_runs_did(tmp_path, monkeypatch):
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    monkeypatch.setattr(shortrun_beta, "SAMPLES", 60)
    short = ("--iterations", "3", "--nf", "2", "--sgld-steps", "4", "--train-images", "100")
    monkeypatch.setattr(shortrun_beta, "DATA", {"digits": short})
    monkeypatch.setattr(
        shortrun_beta, "JUDGE", {"digits": ("--iterations", "2", "--valid-images", "9")}
    )
    cells = [Cell("digits"), Cell("digits", 0.0), Cell("digits", 200.0)]
    monkeypatch.setattr(shortrun_beta, "CELLS", [*cells, Cell("digits", 2000.0)])
    root = tmp_path / "grid"
    for cell in cells:  # here, as the grid's processes would
        name, *options = words_of(cell, root / cell.name)
        config, train = TRAINERS[name]
        assert train(*tyro.cli(config, args=options).open()) is not None
        write_json(root / f"{cell.name}.done", {"commit": "none"})
    text = "\n".join(page(root))
    assert "## digits" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in row] for row in rows if "---" not in row[0]]
    assert [row[head.index("β*")] for row in rows] == ["0", "200"]  # not the one that is not done
    for row, cell in zip(rows, cells[1:], strict=True):
        scores = measure(root / cell.name, root / cells[0].name)
        assert row[head.index("FID")] == f"{scores['samples']['fid']:.3g}"
        assert row[head.index("K")] == "4"
        # An untrained sampler of four steps has not left the noise.
        assert scores["samples"]["fid"] == pytest.approx(scores["noise"]["fid"], rel=0.3)
        assert scores["held_out"]["fid"] < scores["noise"]["fid"]


def test_an_adaptive_run_is_told_apart():
    plain = Cell("digits", 20.0)
    assert replace(plain, most_steps=4).name == f"{plain.name}-most4"
