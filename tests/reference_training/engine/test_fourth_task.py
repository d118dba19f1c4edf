"""A task of a few lines gets all that the engine has: the proof that the trainers need no more."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.sinks import read_jsonl
from tests import forks
from tests.parts import PATIENCE
from tests.reference_training.engine import ring
from tests.reference_training.engine.ring import RingConfig, train
from tests.reference_training.parts import (
    Silent,
    Trainer,
    assert_same_run,
    newest,
    saved,
)

RING = Trainer(train, RingConfig, {})
config_for, go = RING.config_for, RING.go


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing has stopped, and what a person saw."""
    out, reporter = tmp_path_factory.mktemp("runs") / "whole", Silent()
    go(config_for(out), reporter)
    return out, reporter


def test_a_folder_with_rows_results_and_progress(whole):
    out, reporter = whole
    rows = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12))
    for row in rows:
        assert row["gap"] == pytest.approx(row["energy_gap"], abs=1e-6)
        assert row["radius"] > 0
    results = json.loads((out / "results.json").read_text())
    assert (results["steps"], results["iterations"], results["device"]) == (12, 12, "cpu")
    assert results["gap"] == rows[-1]["energy_gap"]
    assert reporter.started == ("a ring", 0, 12)
    assert [done for done, _ in reporter.states] == list(range(1, 13))
    assert {"gap", "GradScale", "ESS", "alert"} == set(reporter.states[-1][1])
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000008.pt", "step-00000012.pt"]


@pytest.mark.parametrize("stop", [7, 12])
def test_ctrl_c_leaves_a_run_that_goes_on_to_the_same_bits(tmp_path, whole, stop):
    assert go(config_for(tmp_path), Silent(interrupt_after=stop)) is None
    assert newest(tmp_path).name == f"step-{stop:08d}.pt"
    assert not (tmp_path / "results.json").exists()
    assert go(RingConfig(out=tmp_path, resume=True)) is not None
    assert_same_run(whole[0], tmp_path)


def test_ctrl_c_at_the_very_end_is_told_and_loses_nothing(tmp_path, whole, monkeypatch):
    def interrupted(task):
        signal.raise_signal(signal.SIGINT)
        return results(task)

    results = ring.Ring.results
    monkeypatch.setattr(ring.Ring, "results", interrupted)
    assert go(config_for(tmp_path)) is None
    assert_same_run(whole[0], tmp_path)


def test_what_was_killed_before_its_first_checkpoint_starts_again(tmp_path, whole):
    _, folder = config_for(tmp_path).open()
    folder.append_rows("metrics.jsonl", [{"step": 0}])
    del folder
    go(RingConfig(out=tmp_path, resume=True))
    assert_same_run(whole[0], tmp_path)


def test_a_finished_run_goes_further_or_stays_as_it_is(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    go(config_for(whole, iterations=13))
    go(config_for(cut, iterations=5))
    for before in (5, 13):
        resumed = Silent()
        go(RingConfig(out=cut, resume=True, iterations=13), resumed)
        assert resumed.started[1:] == (before, 13)
        assert_same_run(whole, cut)
        assert json.loads((cut / "config.json").read_text())["iterations"] == 13


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    child = forks.start("-m", *config_for(cut, iterations=60).command().split())
    deadline = time.monotonic() + PATIENCE
    try:
        while not list((cut / "checkpoints").glob("step-*.pt")):
            assert child.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.join()
    at = saved(cut)["record"]["next_step"]
    assert at % 4 == 0
    go(RingConfig(out=cut, resume=True, iterations=at + 5))
    go(config_for(whole, iterations=at + 5))
    assert_same_run(whole, cut)


@pytest.mark.parametrize("found", [None, 4])
def test_a_checkpoint_of_another_version_is_refused_with_the_reason(tmp_path, found):
    go(config_for(tmp_path, iterations=4))
    state = saved(tmp_path)
    del state["format"]
    torch.save(state if found is None else {**state, "format": found}, newest(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    with pytest.raises(ConfigError, match=rf"have format {found or 1}, this version .* format 3"):
        go(RingConfig(out=tmp_path, resume=True, iterations=8))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")} == before
