"""Doors that led nowhere: wrong paths, terminals, own runs, guarded scripts, help, examples."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ebmguard import cli
from tests import forks
from tests.report.folders import record, rows, write


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Runs as people have them: two of a trainer of their own, one of them lost, and what is none.

    As the guard's ``log_dir`` they hold rows and alerts, and neither settings nor results.
    """
    monkeypatch.chdir(tmp_path)
    for name, rescued in (("ring", True), ("lost", False)):
        path = write(Path("runs") / name, rescued=rescued)
        for file in ("config.json", "results.json", "accuracy.jsonl"):
            (path / file).unlink()
    Path("runs/ring/figures").mkdir()
    Path("runs/notes").mkdir()
    Path("runs/begun").mkdir()
    Path("runs/begun/metrics.jsonl").touch()
    record(Path("deep/a/b"), rows(range(9), seed=1))
    Path("deep/a/b/config.json").write_text('{"betas": ["0", "0.5"]}')
    record(Path("deep/a/c"), rows(range(9), seed=2))
    record(Path("one/a"), rows(range(9), seed=1))
    for i in range(8):
        record(Path(f"many/{i}"), rows(range(2), seed=i))
    Path("nothing").mkdir()
    Path("train.py").touch()


# What is typed, and what its last line says.
REFUSED = {
    "report runs/rnig": r"runs/rnig does not exist\. Runs that are there: runs/ring, runs/.*",
    "compare runs/ring deep/a/d": r"deep/a/d does not exist\. Runs .*: deep/a/b, deep/a/c\.",
    "watch runs --once": r"runs is no run but holds 2\. .*: runs/lost, runs/ring\.",
    "check many": r"many is no run but holds 8\. .*: (many/\d, ){5}many/\d and 2 more\.",
    "report nothing": r"nothing holds no metrics\.jsonl with rows, so that it is no run\. .*",
    "check runs/ring/figures": r"runs/ring/figures holds no .*\. Runs that are there: runs/ring\.",
    "check train.py": r"train\.py is a file; expected a run's folder\. .*: many/0, .* 5 more\.",
    "report runs/ring/metrics.jsonl": r"runs/ring/metrics\.jsonl is a file; .*: runs/ring\.",
    "report runs/begun": r"runs/begun holds a metrics\.jsonl without rows: no step .*",
    "compare one": r"compare takes 2 to 6 run folders; got 1: one/a\.",
    "compare runs/ring one --out x.png": r"--out x\.png: expected a page, such as compare\.html\.",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_path_that_is_no_run_is_told_by_what_it_is(words, place, capsys):
    assert cli.main(words.split()) == cli.USAGE_ERROR
    (said,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"error: {REFUSED[words]}", said), said


# What is typed, and of which runs a table or a page is made.
TAKEN = {
    "compare runs/ring runs/lost": ["ring", "lost"],
    "compare deep/a": ["b", "c"],
    "compare deep/a/b runs/ring": ["b", "ring"],  # an ensemble, and a run without settings
    "compare runs/ring runs/ring": ["runs/ring", "runs/ring"],
    "report one": ["a"],
    "report runs": ["lost", "ring"],  # and not what has only begun
}


@pytest.mark.parametrize("words", TAKEN)
def test_runs_of_anybody_are_taken_and_a_folder_stands_for_those_in_it(words, place, capsys):
    assert cli.main(words.split()) == 0
    command = words.split()[0]
    printed = capsys.readouterr().out
    if command == "compare":
        assert printed.splitlines()[0].split() == TAKEN[words]
    folder = words.split()[1] if len(words.split()) == 2 else "."
    if words == "report one":  # a run's page goes into the run's folder
        folder = "one/a"
    page = Path(folder, f"{command}.html").read_text(encoding="utf-8")
    assert f"<h1>{' · '.join(TAKEN[words])}</h1>" in page


def test_watch_names_the_runs_that_are_there_and_waits(place, monkeypatch, capsys):
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ebmguard.report.watch.time.sleep", sleep)
    assert cli.main(["watch", "runs/rnig"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no run in runs/rnig yet; runs that are there: runs/ring, " in said
    assert "waiting: no such folder yet" in said


@pytest.mark.parametrize("encoding", ["ascii", "cp437", "utf-8"])
def test_a_terminal_shows_what_it_can(encoding, place, monkeypatch):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    for words in ("watch runs/lost --once", "compare runs/lost one", "check runs/lost", "--help"):
        assert cli.main(words.split()) in (0, 1)
    assert cli.main(["check", "runs/β"]) == cli.USAGE_ERROR
    out.flush()
    err.flush()
    printed = out.buffer.getvalue().decode(encoding)
    beta = "β" if encoding == "utf-8" else "beta"  # the letter of cp437 is an ß
    assert f"{beta}* = 0" in printed
    gap = next(line for line in printed.splitlines() if "energy gap" in line)
    assert len(gap) <= 80
    if encoding == "ascii":  # lines of several heights are still lines
        assert len(set(gap) & set("_.-=+*%#")) > 2
        assert "?" not in printed
    said = err.buffer.getvalue().decode(encoding)
    assert said.startswith(f"error: runs/{beta} does not exist")


GUARDED = {
    "by name": "from ebmguard import guard\n{make}",
    "of its room": "from ebmguard.retrofit import guard\n{make}",
    "in a try": "from ebmguard import guard\ntry:\n    {make}\nexcept Exception:\n    pass",
}
MAKE = "guard(None, None, beta_star=0.5, log_dir='runs/ring')"


@pytest.mark.parametrize("name", GUARDED)
def test_a_guarded_script_is_refused_before_it_writes_into_its_run(name, place, capsys):
    text = GUARDED[name].format(make=MAKE, make_of=f"ebmguard.{MAKE}")
    Path("train.py").write_text(text)
    line = next(i for i, each in enumerate(text.splitlines(), 1) if MAKE in each)
    before = {path: path.read_bytes() for path in Path("runs/ring").iterdir() if path.is_file()}
    assert cli.main(["trace", "train.py"]) == cli.USAGE_ERROR
    said = capsys.readouterr().err
    assert f"error: train.py is guarded already, at train.py:{line}." in said
    assert {p: p.read_bytes() for p in Path("runs/ring").iterdir() if p.is_file()} == before
    import ebmguard

    assert ebmguard.guard.__name__ == "guard"  # as before, for who traces in a process


HELP = (
    *("", "--help", "--version", "trace", "train", "figure"),
    *(" ".join((*name[:-1], name[-1].split("|")[0], "--help")) for name in cli.COMMANDS),
)


def test_help_needs_no_torch():
    code = f"""if True:
    import contextlib, io, json, sys
    from ebmguard import cli
    found = {{}}
    for words in {HELP!r}:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            with contextlib.suppress(SystemExit):
                cli.main(words.split())
        found[words] = [name for name in ("torch", "numpy") if name in sys.modules]
    print(json.dumps(found))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {words: [] for words in HELP}


# Of each example what it needs, as its first line says it, the module, and what it says without.
NEEDS = {
    "jem_digits": ("scikit-learn", "sklearn", "pip install scikit-learn"),
    "two_ranks": ("torchrun", "", "torchrun --standalone --nproc-per-node 2 two_ranks.py"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_says_what_it_needs(name, tmp_path):
    first_line, module, sentence = NEEDS[name]
    script = forks.ROOT / "examples" / f"{name}.py"
    assert first_line in script.read_text().splitlines()[0]
    code = f"""if True:
    import runpy, sys
    for known in [{module!r}, *sys.modules]:
        if known.partition(".")[0] == {module!r}:
            sys.modules[known] = None
    sys.argv = [{name!r}]
    runpy.run_path({str(script)!r}, run_name='__main__')"""
    done = forks.run("-c", code, cwd=tmp_path)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert sentence in said
