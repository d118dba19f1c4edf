"""On every structure the lines that are printed are right, or the way out that is said works."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ebmguard import cli
from ebmguard.trace import lines, script
from tests import forks
from tests.trace.field import STRUCTURES


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Writes a script, and replays it in forks."""

    def run(command, **_):
        return forks.run(*command[1:], cwd=Path.cwd())

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run))
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")

    def write(text: str) -> Path:
        path.write_text(text)
        script.source_of.cache_clear()
        return path

    return write


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_lines_or_the_way_out_are_right(name, train, capsys, monkeypatch):
    structure = STRUCTURES[name]
    path = train(structure.text)
    printed = list[lines.Plan]()
    diff = "ebmguard.trace.command._diff"

    def keep(plan):
        printed.append(plan)
        return []

    monkeypatch.setattr(diff, keep)
    status = cli.main(["trace", "-n", "3", str(path)])
    out = capsys.readouterr().out
    for words in (*structure.exit, *structure.says):
        assert words in out, out
    acting = script.replay(train(structure.by_hand(0.5)), [], 3, {})
    assert not acting.error
    assert not acting.warnings
    if structure.exit:
        assert status == 1, out
        plain = script.replay(train(structure.text), [], 3, {})
        off = script.replay(train(structure.by_hand(0.0)), [], 3, {})
        assert acting.state != plain.state
        assert (off.error, [*off.warnings], off.state) == ("", [], plain.state)
        assert off.losses >= 3
    else:
        assert status == 0, out
        train(structure.text)
        found = script.replay(path, [], 3, printed[0].texts())
        assert found.state == acting.state, next(iter(printed[0].texts().values()))


def test_there_are_enough():
    assert len(STRUCTURES) >= 25
