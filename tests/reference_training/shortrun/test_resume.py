"""A run that is stopped in whatever way goes on to the same bits."""

from __future__ import annotations

import json
import shutil
import signal
from typing import Any

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine import interrupt
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.sinks import read_jsonl
from tests import forks
from tests.reference_training.jem.parts import kill_at_a_checkpoint, results_of, steps_of
from tests.reference_training.shortrun.parts import config_for
from tests.reference_training.shortrun.runs import Silent, assert_same_run, go, newest, saved


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a small run that nothing has stopped."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    go(config_for(out))
    return out


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_interrupted_and_resumed_run_ends_with_the_same_bits(tmp_path, whole, stop):
    cut = tmp_path / "cut"
    assert go(config_for(cut), Silent(interrupt_after=stop)) is None
    assert newest(cut).name == f"step-{stop:08d}.pt"
    assert steps_of(cut, "metrics.jsonl") == list(range(stop))
    assert not (cut / "results.json").exists()
    resumed = Silent()
    go(ShortRunConfig(out=cut, resume=True), resumed)
    assert resumed.started[1:] == (stop, 6)
    assert_same_run(whole, cut)


KINDS: dict[str, dict[str, Any]] = {
    "no guard": {"beta_star": 0.0},
    "random K": {"most_sgld_steps": 7},
    "persistent": {"init": "persistent", "buffer_size": 20, "optimizer": "sgd"},
    "finer steps": {"beta_star": 2000.0, "most_steps": 4, "most_sgld_steps": 5, "lr": 0.01},
    "bfloat16": {"precision": "bfloat16", "sample_every": 1, "checkpoint_every": 100},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_resumes_to_the_same_bits(tmp_path, kind):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {"iterations": 12, **KINDS[kind]}
    go(config_for(whole, **settings))
    assert go(config_for(cut, **settings), Silent(interrupt_after=9)) is None
    if kind == "finer steps":
        last = read_jsonl(cut / "metrics.jsonl")[-1]
        assert last["sgld_steps"] >= 2 * 3  # which it goes on with
    go(ShortRunConfig(out=cut, resume=True))
    assert_same_run(whole, cut)


def test_after_ctrl_c_in_the_last_update_the_results_are_left(tmp_path, whole):
    cut = tmp_path / "cut"
    assert go(config_for(cut), Silent(interrupt_after=6)) is None
    assert not (cut / "results.json").exists()
    assert go(ShortRunConfig(out=cut, resume=True)) is not None
    assert_same_run(whole, cut)


def test_a_second_ctrl_c_ends_a_run_at_once_and_it_goes_on_from_its_checkpoint(
    tmp_path, whole, monkeypatch
):
    monkeypatch.setattr(interrupt, "ECHO", -1.0)

    class Insisting(Silent):
        def step(self, done, state):
            if done == 5:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        go(config_for(cut), Insisting())
    assert newest(cut).name == "step-00000003.pt"
    assert steps_of(cut, "metrics.jsonl") == list(range(5))
    go(config_for(cut, resume=True))
    assert_same_run(whole, cut)


def test_a_damaged_checkpoint_costs_updates_and_not_the_run(tmp_path, whole, caplog):
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    newest(cut).write_bytes(b"torn")
    resumed = Silent()
    go(config_for(cut, resume=True), resumed)
    assert resumed.started[1:] == (3, 6)
    assert "passed over" in caplog.text
    assert_same_run(whole, cut)


def test_killed_before_the_first_checkpoint_starts_again(tmp_path, whole):
    cut = tmp_path / "cut"
    _, folder = config_for(cut).open()
    folder.append_rows("metrics.jsonl", [{"step": 0}])
    go(config_for(cut, resume=True))
    assert_same_run(whole, cut)


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path, whole):
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    before = results_of(again)
    resumed = Silent()
    assert go(ShortRunConfig(out=again, resume=True), resumed) is not None
    assert resumed.started[1:] == (6, 6)
    assert results_of(again) == before
    assert_same_run(whole, again)


def test_resume_with_more_iterations_goes_further_and_not_with_fewer(tmp_path, whole):
    longer = tmp_path / "longer"
    go(config_for(longer, iterations=4))
    go(ShortRunConfig(out=longer, resume=True, iterations=6))
    assert_same_run(whole, longer)
    stored = json.loads((longer / "config.json").read_text())
    assert stored["iterations"] == stored["settings"]["iterations"] == 6
    with pytest.raises(ConfigError, match="has 6 steps already, iterations is 5"):
        go(ShortRunConfig(out=longer, resume=True, iterations=5))
    assert_same_run(whole, longer)


def test_a_folder_that_holds_a_run_is_refused(whole):
    before = {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="already holds a run"):
        go(config_for(whole))
    assert {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()} == before


def test_time_before_a_stop_counts(tmp_path):
    assert go(config_for(tmp_path), Silent(interrupt_after=3)) is None
    file = newest(tmp_path)
    state = torch.load(file, weights_only=True)
    assert 0 < state["record"]["elapsed"] < 600
    state["record"]["elapsed"] += 1000
    torch.save(state, file)
    results = go(ShortRunConfig(out=tmp_path, resume=True))
    assert results is not None
    assert results["wall_seconds"] > 1000


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {"checkpoint_every": 5, "sample_every": 100_000, "most_sgld_steps": 4}
    words = config_for(cut, iterations=100_000, **settings).command().split()[1:]
    kill_at_a_checkpoint(forks.start("-m", "ebmguard", *words), cut)
    at = saved(cut)["record"]["next_step"]
    assert at % 5 == 0
    assert go(ShortRunConfig(out=cut, resume=True, iterations=at + 5)) is not None
    go(config_for(whole, iterations=at + 5, **settings))
    assert_same_run(whole, cut)
