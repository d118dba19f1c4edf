"""`ebmguard compare`: the table; its page is that of `ebmguard report`."""

from __future__ import annotations

import json

import pytest

from ebmguard import cli

from .folders import LOST_AT, write


def table(capsys, monkeypatch, *words: str, width: int = 200) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["compare", *words]) == 0
    return [line for line in capsys.readouterr().out.splitlines()[:-2] if line]


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "guarded")
    write(tmp_path / "unguarded", rescued=False)
    (tmp_path / "unguarded" / "results.json").write_text(
        json.dumps({"diverged_at": LOST_AT, "accuracy": 0.1, "wall_seconds": 12.0})
    )
    return "guarded", "unguarded"


def test_the_table_says_what_happened(pair, capsys, monkeypatch):
    lines = {line.split("  ")[0]: line for line in table(capsys, monkeypatch, *pair)}
    assert "finished 300 steps after 1 rollback" in lines["outcome"]
    assert f"DIVERGED at step {LOST_AT}" in lines["outcome"]
    # The last evaluation before the alert had 97%.
    said = f"step {LOST_AT}: energy_blowup, accuracy then 97.0%"
    assert lines["first ERROR"].count(said) == 2
    assert lines["first WARN"].split()[-2:] == ["none", "none"]
    assert lines["best test accuracy"].split()[-2:] == ["0.97", "—"]
    # At β* = 0 the weights are those of the reference exponent.
    assert lines["GradScale"].split()[-1] == "—"
    assert lines["reference GradScale"].split()[-2:] == ["—", "0"]
    assert lines["energy gap"].split()[-1] == "inf"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_folds_and_loses_no_word(width, pair, capsys, monkeypatch):
    folded = table(capsys, monkeypatch, *pair, width=width)
    assert max(map(len, folded)) <= width
    assert sorted(" ".join(folded).split()) == sorted(
        " ".join(table(capsys, monkeypatch, *pair)).split()
    )
