"""The command line, end to end."""

from __future__ import annotations

import json
import sys

import pytest

import ebmguard
from ebmguard import cli

SMALL = ["--n-pos", "8", "--n-neg", "8", "--sgld-steps", "2", "--device", "cpu"]


def test_trains_twenty_steps_and_says_how_it_went(tmp_path, capsys):
    out = tmp_path / "x"
    words = ["train", "jem", "--out", str(out), "--iterations", "20", "--beta-star", "2", *SMALL]
    assert cli.main(words) == 0
    assert "finished 20 steps" in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == 20
    assert results["beta_star"] == 2
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 20
    assert cli.main(words) == cli.USAGE_ERROR
    assert "already holds a run" in capsys.readouterr().err
    assert cli.main(["train", "jem", "--out", str(out), "--resume", "--iterations", "21"]) == 0
    assert json.loads((out / "results.json").read_text())["steps"] == 21


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """The status of a command, and what it prints: of one that fails, on stderr."""
    try:
        status: object = cli.main(words)
    except SystemExit as stopped:
        status = stopped.code
    shown = capsys.readouterr()
    return status, shown.err if status else shown.out


@pytest.mark.parametrize("words", [[], ["fly"], ["--help"]])
def test_users_commands_come_first_on_one_screen_and_those_of_the_papers_as_one_line(words, capsys):
    status, shown = said(words, capsys)
    assert status == (0 if words == ["--help"] else cli.USAGE_ERROR)
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "train jem" not in shown
    assert [line.split()[0] for line in lines[3:10]] == [
        *("trace", "watch", "report", "check", "compare", "demo", "paper")
    ]


# What is asked: its status, what is said, and what is not.
SAID: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "train": (2, ("train jem",), ()),
    "train jem --help": (0, ("--beta-star",), ()),
    "train jem --out x --lr 0": (2, ("error: the settings do not make a run",), ("Traceback",)),
    "--version": (0, (f"ebmguard {ebmguard.__version__}\n",), ()),
    # The commands of the papers, before which that word may stand.
    "paper": (2, ("train jem",), ("trace",)),
    "paper figure --help": (0, ("a toy figure",), ()),
    "paper train jem --help": (0, ("usage: ebmguard train jem",), ()),
    "paper watch": (2, ("unknown command watch",), ()),
    # A first word lists the commands that begin with it.
    "figure --help": (0, ("a toy figure", "a JEM figure"), ("train jem", "train toy")),
    "figure 99": (2, ("figure 3|4|16",), ()),
    # Toys are trained, JEM runs are given.
    "figure 2 --help": (0, ("usage: ebmguard figure [-h]", "--seeds"), ("--runs",)),
    "figure 16 --help": (0, ("usage: ebmguard figure [-h]", "--runs"), ("--seeds",)),
    # What is unknown, and what may be meant.
    "bogus": (2, ("unknown command bogus",), ()),
    "fly --help": (2, ("unknown command fly",), ()),  # which is no help
    "wach runs/1": (2, ("unknown command wach; did you mean watch?",), ()),
    "train jme": (2, ("unknown command train jme; did you mean jem?",), ()),
    "figure interpolate": (
        2,
        ("unknown command figure interpolate; did you mean interpolation",),
        (),
    ),
    "\x1b[31m": (2, ("unknown command \ufffd[31m",), ()),
}


@pytest.mark.parametrize("words", SAID)
def test_what_a_command_says(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, shown = said(words.split(" "), capsys)
    expected, there, not_there = SAID[words]
    assert status == expected
    assert all(text in shown for text in there), shown
    assert not any(text in shown for text in not_there), shown


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("tyro", "cli", "train jem"),
        ("sklearn.datasets", "train", "train jem"),
        ("scipy.io", "train", "train jem --data svhn --scenario 1"),
        ("PIL.Image", "train", "train shortrun --data celeba64"),
        ("matplotlib.figure", "train", "figure 12 --runs none"),
    ],
)
def test_without_a_package_says_what_to_install(
    tmp_path, monkeypatch, capsys, package, extra, words
):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("EBMGUARD_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    out = [] if words.startswith("figure") else ["--out", str(tmp_path / "run")]
    assert cli.main([*words.split(), *out]) == cli.USAGE_ERROR
    shown = capsys.readouterr().err
    assert package in shown
    assert f'pip install ".[{extra}]"' in shown


def test_ctrl_c_is_told_by_the_status_and_not_by_a_traceback(monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    load = cli.load
    monkeypatch.setattr(
        cli, "load", lambda where: interrupted if where.endswith(":compare") else load(where)
    )
    assert cli.main(["compare", "a", "--out", "b"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
