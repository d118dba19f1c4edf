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


def test_wrong_settings_are_one_line_and_no_traceback(tmp_path, capsys):
    assert cli.main(["train", "jem", "--out", str(tmp_path / "x"), "--lr", "0"]) == cli.USAGE_ERROR
    assert capsys.readouterr().err.startswith("error: the settings do not make a run")


@pytest.mark.parametrize(
    ("words", "status", "stream"),
    [([], 2, "err"), (["fly"], 2, "err"), (["train"], 2, "err"), (["--help"], 0, "out")],
)
def test_lists_the_commands(words, status, stream, capsys):
    assert cli.main(words) == status
    shown = getattr(capsys.readouterr(), stream)
    if words == ["train"]:
        assert "train jem" in shown
        return
    # On one screen: users' commands first, those of the papers as one line.
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "train jem" not in shown
    assert [line.split()[0] for line in lines[3:10]] == [
        *("trace", "watch", "report", "check", "compare", "demo", "paper")
    ]


def test_paper_lists_the_commands_of_the_papers_and_may_stand_before_them(capsys):
    assert cli.main(["paper"]) == cli.USAGE_ERROR
    shown = capsys.readouterr().err
    assert "train jem" in shown
    assert "trace" not in shown
    assert cli.main(["paper", "figure", "--help"]) == 0
    assert "a toy figure" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["paper", "train", "jem", "--help"])
    assert stopped.value.code == 0
    assert "usage: ebmguard train jem" in capsys.readouterr().out
    assert cli.main(["paper", "watch"]) == cli.USAGE_ERROR
    assert "unknown command watch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["bogus"], "unknown command bogus"),
        (["wach", "runs/1"], "unknown command wach; did you mean watch?"),
        (["train", "jme"], "unknown command train jme; did you mean jem?"),
        (
            ["figure", "interpolate"],
            "unknown command figure interpolate; did you mean interpolation",
        ),
        (["\x1b[31m"], "unknown command \ufffd[31m"),
    ],
)
def test_says_what_is_unknown_and_what_may_be_meant(words, reason, capsys):
    assert cli.main(words) == cli.USAGE_ERROR
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ebmguard {ebmguard.__version__}\n"


def test_help_of_a_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "jem", "--help"])
    assert stopped.value.code == 0
    assert "--beta-star" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["2", "16"])
def test_help_of_a_figure_is_that_of_its_family(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["figure", name, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: ebmguard figure [-h]" in shown
    # Toys are trained, JEM runs are given.
    assert ("--seeds" in shown, "--runs" in shown) == (name == "2", name == "16")


def test_help_of_a_first_word_lists_the_commands_that_begin_with_it(capsys):
    assert cli.main(["figure", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "a toy figure" in shown
    assert "a JEM figure" in shown
    assert "train" not in shown.replace("train what it needs", "")
    assert cli.main(["figure", "99"]) == cli.USAGE_ERROR
    assert "figure 3|4|16" in capsys.readouterr().err
    # The help of a command that there is not is no help.
    assert cli.main(["fly", "--help"]) == cli.USAGE_ERROR


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
    said = capsys.readouterr().err
    assert package in said
    assert f'pip install ".[{extra}]"' in said


def test_takes_the_words_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ebmguard", "--help"])
    assert cli.main() == 0
    assert "compare" in capsys.readouterr().out


def test_ctrl_c_is_told_by_the_status_and_not_by_a_traceback(monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    load = cli.load
    monkeypatch.setattr(
        cli, "load", lambda where: interrupted if where.endswith(":compare") else load(where)
    )
    assert cli.main(["compare", "a", "--out", "b"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
