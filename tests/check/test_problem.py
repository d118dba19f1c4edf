"""Problems for people."""

from __future__ import annotations

import sys

import pytest

from ebmguard import Level
from ebmguard.check import Problem, show
from ebmguard.check.problem import to_text

PROBLEMS = [
    Problem(Level.INFO, "small", "train.py:3", "A thing to know.", "nothing."),
    Problem(Level.ERROR, "large", "train.py:9", "word " * 40 + "end.", "replace `f(x).mean()`."),
]


def test_groups_come_worst_first_and_lines_are_short():
    lines = to_text(PROBLEMS).splitlines()
    assert lines[0] == "1 error"
    assert lines[1].split() == ["train.py:9", "large"]
    assert max(map(len, lines)) <= 100
    assert any(line.strip() == "fix: replace `f(x).mean()`." for line in lines)
    assert lines.index("1 note") > lines.index("  train.py:9  large")


def test_nothing_found_is_said():
    assert to_text([]) == "no problems found"


@pytest.mark.parametrize("with_rich", [True, False])
def test_prints_plain_text_where_there_is_no_terminal(with_rich, capsys, monkeypatch):
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    show(PROBLEMS)
    assert capsys.readouterr().out == to_text(PROBLEMS) + "\n"


def test_prints_in_colour_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(PROBLEMS)
    out = capsys.readouterr().out
    assert "\x1b[1;31m" in out
    assert "train.py:9" in out
    show([])
    assert "no problems found" in capsys.readouterr().out
