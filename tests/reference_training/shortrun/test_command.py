"""`ebmguard train shortrun` as it is called: what it says, and its exit status."""

from __future__ import annotations

import json
import logging
import shlex
import signal

import pytest

from ebmguard.cli import main
from ebmguard.reference_training.engine import loop
from ebmguard.reference_training.shortrun.train import told
from tests.reference_training.jem.parts import Silent, newest
from tests.reference_training.shortrun.parts import config_for


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
    assert lines[1] == "finished 6 steps without divergence"
    medians = results["median_last_100"]
    assert lines[-1] == (
        f"medians of the last 100 updates: energy gap {medians['energy_gap']:.3g}, "
        f"GradScale {medians['grad_scale']:.3g}, ESS {medians['ess']:.3g}"
    )
    # Resumed when there is nothing left to do, it says so again.
    assert main(["train", "shortrun", "--out", str(out), "--resume"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == lines[2:]


def test_a_stop_says_how_to_go_on_and_has_the_shells_status(tmp_path, monkeypatch, capsys):
    class Stopping(Silent):
        def step(self, done, state):
            if done == 2:
                signal.raise_signal(signal.SIGTERM)

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
    assert "finished 6 steps" in capsys.readouterr().out


def test_the_ways_to_end(tmp_path):
    def words(**changes):
        nothing = dict.fromkeys(("ended", "diverged_at", "first_warn", "first_error"))
        return [*loop.course({**nothing, "steps": 7, "rollbacks": [], **changes}, tmp_path)][1:]

    same = {"message": "E b"}  # is said once
    assert words() == ["finished 7 steps without divergence"]
    lost = words(diverged_at=6, first_warn={"message": "WARN a"}, first_error=same)
    assert lost == ["DIVERGED at step 6", "first warn: WARN a", "first error: E b"]
    ended = words(ended="E b", diverged_at=6, first_warn=same, first_error=same)
    assert ended == ["ENDED by the guard after 7 steps: E b"]
    lost = words(diverged_at=6, first_warn=same, first_error=same)
    assert lost == ["DIVERGED at step 6", "first error: E b"]


def test_without_a_guard_weights_are_what_they_would_be():
    medians = {"energy_gap": 0.1234, "grad_scale": 0.5, "ess": None}
    medians |= {"ref/grad_scale": 0.75, "ref/ess": 0.25}
    for beta_star, said in ((0.02, "GradScale 0.5"), (0.0, "GradScale 0.75, ESS 0.25")):
        found = told({"median_last_100": medians, "beta_star": beta_star})
        assert found == f"medians of the last 100 updates: energy gap 0.123, {said}"
