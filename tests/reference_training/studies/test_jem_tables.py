"""The page as a reader of Markdown sees it."""

from __future__ import annotations

from typing import Any

import pytest

from ebmguard import cli
from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.paper import TABLE_1
from ebmguard.reference_training.jem.runs import find_runs
from ebmguard.reference_training.studies.config import TableConfig
from ebmguard.reference_training.studies.jem_tables import page, run
from tests.reference_training.jem.fabricate import made_up_evaluation, write_run

SMALL: dict[str, Any] = {
    "iterations": 30,
    "steps_per_epoch": 10,
    "depth": 10,
    "width": 1,
    "train_images": 640,
}


def tables(text):
    """Title of each section -> its table as dicts, by a parser that knows Markdown alone."""
    found = {}
    for section in text.split("## ")[1:]:
        title, *lines = section.splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
        if rows:
            head, rule, *body = rows
            assert all(set(cell) <= {"-", ":"} for cell in rule)
            found[title] = [head, *body]
    return found


def published(folder, beta_star, **options):
    """A run at the published size, with few lines."""
    return write_run(folder, beta_star=beta_star, every=20_000, **options)


def test_table_1_puts_ours_beside_the_papers(tmp_path):
    published(tmp_path / "zero", 0.0, diverged_at=40_000)
    published(tmp_path / "half", 0.5)
    published(tmp_path / "part", 10.0, finished=False, steps=80_000)
    (title, found), *_ = tables(page(find_runs([tmp_path]))).items()
    assert title == "Table 1, setup A: scenario 1 by β*"
    head, *rows = found
    assert head[3:] == ["ACC (%) ours", "paper", "IS ours", "paper", "FID ours", "paper"]
    by_strength = {row[0]: row for row in rows}
    assert list(by_strength) == [f"{beta_star:g}" for beta_star in TABLE_1]
    assert by_strength["0.5"][4::2] == ["91.2", "8.6", "38.9"]
    assert by_strength["0.5"][1] == "2.5e-05"
    assert by_strength["4"][3::2] == ["not run"] * 3
    # Of the epochs before the divergence, and of those so far.
    last = made_up_evaluation(0, 40_000 // 703, 0.0, lost=False)
    assert by_strength["0"][3] == f"{100 * last['test_accuracy']:.1f}†"
    assert by_strength["10"][3].endswith("…")


def test_table_2_names_the_best_beta_star_of_each_metric(tmp_path):
    for beta_star in (0.0, 0.5, 4.0):
        published(tmp_path / f"{beta_star:g}", beta_star, scenario="6")
    found = tables(page(find_runs([tmp_path])))
    (title,) = [name for name in found if name.startswith("Table 2")]
    rows = found[title][1:]
    assert len(rows) == 14
    paper, ours = rows[10:12]
    assert (paper[0], paper[2], ours[2]) == ("6", "paper", "ours")
    assert paper[4:] == ["36.2", "2.9", "154.1", "92.4 (4)", "8.0 (0.5)", "41.5 (0.5)"]
    # As made up: accuracy rises with β*, the other two get worse.
    assert [cell.split(" ")[1] for cell in ours[7:]] == ["(4)", "(0.5)", "(0.5)"]
    assert rows[1][4:] == ["not run"] * 6
    assert not any(name.startswith("Table 1") for name in found)


def test_the_command_prints_and_writes_the_same_page(tmp_path, capsys):
    path = write_run(tmp_path / "x", **SMALL)
    out = tmp_path / "page.md"
    assert cli.main(["table", "jem", str(path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    assert "| `x`" in printed


def test_what_cannot_be_meant_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="name run folders"):
        run(TableConfig(runs=()))
    path = write_run(tmp_path / "x", **SMALL)
    with pytest.raises(ConfigError, match="cannot be written"):
        run(TableConfig(runs=(path,), out=tmp_path / "no" / "page.md"))
