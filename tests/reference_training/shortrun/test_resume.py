"""A run that is stopped in whatever way goes on to the same bits."""

from __future__ import annotations

import shutil
import signal

import pytest

from ebmguard.reference_training.engine import interrupt
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from tests.reference_training.jem.parts import Silent, assert_same_run, newest, results_of, steps_of
from tests.reference_training.shortrun.parts import config_for, go


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a small run that nothing has stopped."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    go(config_for(out))
    return out


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
