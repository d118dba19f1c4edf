"""`ebmguard compare`: the table; its page is that of `ebmguard report`."""

from __future__ import annotations

import json

import pytest

from ebmguard import cli

from .folders import LOST_AT, record, write


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


def test_what_a_rollback_took_back_is_not_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # After step 24 it went back to step 15, and ended with step 29: 40 rows of 30 steps.
    steps = [(s, 0) for s in range(25)] + [(s, 1) for s in range(15, 30)]
    for name in "ab":
        record(
            tmp_path / name,
            [(s, {"recovery/attempt": n, "energy_gap": n - s / 8}) for s, n in steps],
        )
        found = [{"step": s, "attempt": n, "test_accuracy": n / 2} for s, n in ((20, 0), (20, 1))]
        (tmp_path / name / "accuracy.jsonl").write_text("\n".join(map(json.dumps, found)))
    lines = {line.split("  ")[0]: line for line in table(capsys, monkeypatch, "a", "b")}
    assert lines["outcome"].count("30 steps so far") == 2
    assert lines["test accuracy"].split()[-2:] == ["0.5", "0.5"]
    assert lines["energy gap"].split()[-2:] == ["-2.625", "-2.625"]
