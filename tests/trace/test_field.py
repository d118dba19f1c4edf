"""On every structure the lines that are printed are right, or the way out that is said works."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebmguard import cli
from ebmguard.trace import lines, refusals, script
from tests import forks
from tests.trace.exits import EXITS
from tests.trace.field import STRUCTURES, Structure

RIGHT = [name for name in STRUCTURES if name not in EXITS]
BETA_STAR = 0.5  # of guards that act
STEPS = 12  # three epochs, where there are any: the trace ends with the first
Replay = Callable[[Structure, float | None], script.Replay]


@pytest.fixture
def replay(tmp_path, monkeypatch) -> Replay:
    """Replays a structure in a fork: as it is, or with its edits at this β*."""

    def run(command, **_):
        return forks.run(*command[1:], cwd=Path.cwd())

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run))
    monkeypatch.chdir(tmp_path)

    def of(structure, right, **told):
        return script.replay(write(structure, right), [], STEPS, {}, **told)

    return of


def write(structure: Structure, right: dict[str, str]) -> Path:
    """Its files in the present folder; the script."""
    # Compiled files are told from newer ones by seconds and size alone.
    shutil.rmtree("__pycache__", ignore_errors=True)
    for name, text in structure.files(right).items():
        sys.modules.pop(name.removesuffix(".py"), None)
        Path(name).write_text(text)
    script.source_of.cache_clear()
    return Path(name)


@pytest.mark.parametrize("name", RIGHT)
def test_the_lines_are_right(name, replay, capsys, monkeypatch):
    structure, printed = STRUCTURES[name], list[lines.Plan]()

    def keep(plan):
        printed.append(plan)
        return []

    monkeypatch.setattr("ebmguard.trace.command._diff", keep)
    path = write(structure, {})
    status = cli.main(["trace", "-n", "3", str(path)])
    out = capsys.readouterr().out
    assert status == 0, out
    for words in structure.says:
        assert words in out, out
    found = script.replay(path, [], STEPS, printed[0].texts(), beta_star=BETA_STAR)
    acting = replay(structure, structure.right, beta_star=BETA_STAR)
    assert not acting.error
    assert not acting.warnings
    assert found.state == acting.state, next(iter(printed[0].texts().values()))


@pytest.mark.parametrize("name", EXITS)
def test_the_way_out_works(name, replay, capsys):
    structure = EXITS[name]
    assert cli.main(["trace", "-n", "3", str(write(structure, {}))]) == 1
    out = capsys.readouterr().out
    what, way_out = refusals.REFUSALS[structure.refused]
    for words in re.split(r"\{[^}]*\}", f"{what}{{}}way out: {way_out}"):
        assert words in out, out
    if structure.again:
        assert cli.main(["trace", "-n", "3", str(write(structure, structure.right))]) == 0
        return
    if re.search(r"\{(guard|ways)\}", way_out):
        for call in re.findall(r"ebmguard\.guard\(.*\)", "".join(structure.right.values())):
            assert f'{call[:-1]}, log_dir="runs/' in out, out
    plain = replay(structure, {})
    acting = replay(structure, structure.right, beta_star=BETA_STAR)
    off = replay(structure, structure.right, beta_star=0.0)
    # It is said to a sampler without gradients that it has none, and to do nothing.
    acting, off = (
        each._replace(warnings=[x for x in each.warnings if "Fix: nothing" not in x])
        for each in (acting, off)
    )
    assert (off.error, [*off.warnings]) == ("", [])
    assert (off.state == plain.state) is not structure.is_other
    assert off.losses >= STEPS
    assert (acting.error, [*acting.warnings]) == ("", [])
    assert acting.state != plain.state


def test_none_lacks_a_way_out_that_is_followed():
    assert {each.refused for each in EXITS.values()} == {*refusals.REFUSALS}
