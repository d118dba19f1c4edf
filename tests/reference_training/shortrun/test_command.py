"""`ebmguard train shortrun` as it is called: what it says, and its exit status."""

from __future__ import annotations

import json
import logging
import re
import shlex
import signal

import pytest

from ebmguard.cli import main
from ebmguard.reference_training.engine import loop
from ebmguard.reference_training.shortrun.command import summary
from tests import forks
from tests.reference_training.shortrun.parts import config_for
from tests.reference_training.shortrun.runs import Silent, newest


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(loop, "default_reporter", lambda every: Silent())
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)


def words(out, **settings):
    return shlex.split(config_for(out, **settings).command())[1:]


def test_a_run_says_how_it_went(tmp_path, capsys):
    assert main(words(tmp_path / "run")) == 0
    out = tmp_path / "run"
    text = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    lines = text.splitlines()
    assert lines[0] == f"results in {out}"
    assert re.fullmatch(r"finished 6 updates in \d+ s", lines[1])
    medians = results["median_last_100"]
    assert lines[-2] == (
        f"medians of the last 100 updates: energy gap {medians['energy_gap']:.3g}, "
        f"GradScale {medians['grad_scale']:.3g}, ESS {medians['ess']:.3g}"
    )
    assert lines[-1] == f"its last samples: {out}/figures/samples_end.png"
    # Resumed when there is nothing left to do, it says so again.
    assert main(["train", "shortrun", "--out", str(out), "--resume"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == lines[2:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_says_how_to_go_on_and_has_the_shells_status(tmp_path, monkeypatch, capsys, number):
    class Stopping(Silent):
        def step(self, done, state):
            if done == 2:
                signal.raise_signal(number)

    monkeypatch.setattr(loop, "default_reporter", lambda every: Stopping())
    out = tmp_path / "a run"
    assert main(words(out)) == 130
    said = capsys.readouterr().out
    assert said.startswith("stopped; go on with: ebmguard train shortrun --out ")
    assert said.endswith("--resume\n")
    assert newest(out).name == "step-00000002.pt"
    monkeypatch.setattr(loop, "default_reporter", lambda every: Silent())
    # The very words that it said.
    assert main(shlex.split(said.removeprefix("stopped; go on with: "))[1:]) == 0
    assert "finished 6 updates" in capsys.readouterr().out


def test_a_process_of_its_own(tmp_path):
    done = forks.run("-m", "ebmguard", *words(tmp_path / "run", beta_star=0.0))
    assert done.returncode == 0, done.stderr
    assert "finished 6 updates" in done.stdout
    assert "beta* = 0: step 0 of 6" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "mnist", "--data-root", "/no/such"], "/no/such, which is not a folder"),
        (["--beta-star", "nan"], "beta_star is nan, expected a finite number"),
        (["--resume"], "holds no run to resume"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_status_2(tmp_path, capsys, arguments, says):
    out = tmp_path / "run"
    assert main(["train", "shortrun", "--out", str(out), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert says in said
    assert "Traceback" not in said
    assert not out.exists()


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "shortrun", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("out", "data", "beta-star", "sgld-steps", "most-sgld-steps", "init", "start-from"):
        assert f"--{name} " in text


def results(**changes):
    return {
        "ended": None,
        "diverged_at": None,
        "steps": 7,
        "wall_seconds": 12.4,
        "beta_star": 0.02,
        "first_warn": None,
        "first_error": None,
        "median_last_100": {
            "energy_gap": 0.1234,
            "grad_scale": 0.5,
            "ref/grad_scale": 0.75,
            "ess": None,
            "ref/ess": 0.25,
        },
        **changes,
    }


def test_the_ways_to_end(tmp_path):
    assert summary(results(), tmp_path).splitlines() == [
        f"results in {tmp_path}",
        "finished 7 updates in 12 s",
        "medians of the last 100 updates: energy gap 0.123, GradScale 0.5",
    ]
    lost = results(diverged_at=6, first_warn={"message": "WARN a"}, first_error={"message": "E b"})
    assert summary(lost, tmp_path).splitlines()[1:4] == [
        "DIVERGED at update 6",
        "first warn: WARN a",
        "first error: E b",
    ]
    same = {"message": "E b"}  # is said once
    ended = results(ended="E b", diverged_at=6, first_warn=same, first_error=same)
    assert summary(ended, tmp_path).splitlines()[1:-1] == [
        "ENDED by the guard after 7 updates: E b"
    ]
    lost = results(diverged_at=6, first_warn=same, first_error=same)
    assert summary(lost, tmp_path).splitlines()[2:-1] == ["first error: E b"]
    # Without a guard its weights are uniform, and what they would be is said.
    assert "GradScale 0.75, ESS 0.25" in summary(results(beta_star=0.0), tmp_path)
