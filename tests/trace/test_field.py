"""On every structure the lines that are printed are right, or the way out that is said works."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest

import ebmguard
from ebmguard import cli
from ebmguard.trace import command, lines, refusals, script, tracer
from tests.trace.exits import EXITS
from tests.trace.field import STRUCTURES, Structure

RIGHT = [name for name in STRUCTURES if name not in EXITS]
BETA_STAR = 0.5  # of guards that act
STEPS = 12  # three epochs, where there are any: the trace ends with the first


@pytest.fixture
def here(monkeypatch):
    """Replays in this process; `test_a_traced_run_ends_as_a_plain_one` has one of its own."""

    def run(command, **_):
        with monkeypatch.context() as patched:
            for owner, name in ((ebmguard, "guard"), (SourceFileLoader, "get_code")):
                patched.setattr(owner, name, getattr(owner, name))
            patched.setattr(logging.getLogger("ebmguard"), "handlers", [])
            forget()
            script._main(Path(command[-1]))

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run))


def forget() -> None:
    """Let the structures' modules be imported anew."""
    for name in [name for name in sys.modules if name.startswith("of_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(structure: Structure, *, is_right: bool = False) -> Path:
    """Its files in the present folder; the script."""
    # Compiled files are told from newer ones by seconds and size alone.
    shutil.rmtree("__pycache__", ignore_errors=True)
    forget()
    for name, text in structure.files(is_right=is_right).items():
        Path(name).write_text(text)
    script.source_of.cache_clear()
    return Path(name)


def replay(structure: Structure, *, is_right: bool = True, **told: float) -> script.Replay:
    return script.replay(write(structure, is_right=is_right), [], STEPS, {}, **told)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", RIGHT)
def test_the_lines_are_right_and_proven(name, capsys, monkeypatch):
    structure, printed, diff = STRUCTURES[name], list[lines.Plan](), command._diff

    def kept(plan: lines.Plan) -> Iterator[str]:
        printed.append(plan)
        return diff(plan)

    monkeypatch.setattr(command, "_diff", kept)
    path = write(structure)
    status = cli.main(["trace", "-n", "3", str(path), "--of-the-script", "3"])
    out = capsys.readouterr().out
    assert status == 0, out
    for words in ("the same bit for bit", *structure.says):
        assert words in out, out
    found = script.replay(path, [], STEPS, printed[0].texts(), beta_star=BETA_STAR)
    acting = replay(structure, beta_star=BETA_STAR)
    assert not acting.error
    assert not acting.warnings
    assert found.state == acting.state, next(iter(printed[0].texts().values()))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", EXITS)
def test_the_way_out_works(name, capsys):
    structure = EXITS[name]
    assert cli.main(["trace", "-n", "3", str(write(structure))]) == 1
    out = capsys.readouterr().out
    assert "\nproven" not in out
    what, way_out = refusals.REFUSALS[structure.refused]
    for words in re.split(r"\{[^}]*\}", f"{what}{{}}way out: {way_out}"):
        assert words in out, out
    if structure.again:
        assert cli.main(["trace", "-n", "3", str(write(structure, is_right=True))]) == 0
        return
    if re.search(r"\{(guard|ways)\}", way_out):
        for call in re.findall(r"ebmguard\.guard\(.*\)", structure.guard):
            assert f'{call[:-1]}, log_dir="runs/' in out, out
    plain = replay(structure, is_right=False)
    # It is said to a sampler without gradients that it has none, and to do nothing.
    acting, off = (
        done._replace(warnings=tuple(x for x in done.warnings if "Fix: nothing" not in x))
        for done in (replay(structure, beta_star=BETA_STAR), replay(structure, beta_star=0.0))
    )
    assert (off.error, [*off.warnings]) == ("", [])
    assert (off.state == plain.state) is not structure.is_other
    assert off.losses >= STEPS
    assert (acting.error, [*acting.warnings]) == ("", [])
    assert acting.state != plain.state


def test_none_lacks_a_way_out_that_is_followed():
    assert {structure.refused for structure in EXITS.values()} == {*refusals.REFUSALS}


def test_a_traced_run_ends_as_a_plain_one():
    path = write(STRUCTURES["a_latent_model"])
    found = tracer.trace_script(path, [], 3)
    plain = script.replay(path, [], found.steps, {})
    assert not found.error
    assert found.state
    assert plain.state == found.state


def test_a_script_that_ends_first_is_no_error_of_its_own():
    path = write(STRUCTURES["an_affine_energy"])
    path.write_text(path.read_text().replace("range(30)", "range(3)"))
    found = tracer.trace_script(path, [], 9)
    assert (found.steps, found.error, found.state) == (3, "", "")


def test_settings_that_cannot_be_meant(tmp_path, capsys):
    assert cli.main(["trace", str(tmp_path / "none.py")]) == cli.USAGE_ERROR
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "some.py").touch()
    assert cli.main(["trace", "-n", "1", str(tmp_path / "some.py")]) == cli.USAGE_ERROR
    assert "expected 2 or more" in capsys.readouterr().err
