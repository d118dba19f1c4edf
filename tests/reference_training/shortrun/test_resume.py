"""A run that is stopped in whatever way goes on to the same bits."""

from __future__ import annotations

import shutil
import signal
from typing import Any

import pytest

from ebmguard.reference_training.engine import interrupt
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.sinks import read_jsonl
from tests.reference_training.jem.parts import results_of, steps_of
from tests.reference_training.shortrun.parts import config_for
from tests.reference_training.shortrun.runs import Silent, assert_same_run, go, newest


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


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path, whole):
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    before = results_of(again)
    resumed = Silent()
    assert go(ShortRunConfig(out=again, resume=True), resumed) is not None
    assert resumed.started[1:] == (6, 6)
    assert results_of(again) == before
    assert_same_run(whole, again)
