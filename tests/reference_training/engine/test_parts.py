"""Interrupts, progress, records and ranks: what a loop is made of."""

from __future__ import annotations

import logging
import math
import os
import signal

import pytest

from ebmguard.alerts import Alert, Level
from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine import interrupt as interrupt_module
from ebmguard.reference_training.engine import progress
from ebmguard.reference_training.engine.interrupt import DeferredInterrupt
from ebmguard.reference_training.engine.loop import Run
from ebmguard.reference_training.engine.ranks import joined_ranks
from ebmguard.reference_training.engine.record import Record
from tests.ranks import rank_fixtures
from tests.reference_training.engine import ranks_process
from tests.reference_training.engine.ring import Ring, RingConfig
from tests.reference_training.parts import CPU, Silent

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_waits_and_a_second_ctrl_c_does_not(monkeypatch, first):
    now = 100.0
    monkeypatch.setattr(interrupt_module.time, "monotonic", lambda: now)
    before = [signal.getsignal(number) for number in SIGNALS]
    with DeferredInterrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), first)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)  # the echo of a launcher
        now += 1.1
        for number in SIGNALS[1:]:  # a scheduler says it again, and then kills
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.fixture
def terminal(monkeypatch):
    """Where the program logs as a trainer's command does, on a terminal."""
    for name, value in (("TERM", "xterm"), ("FORCE_COLOR", "1"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    progress.log_to_terminal()


def run_of(out, **settings) -> Run:
    config, folder = RingConfig(out=out, device="cpu", **settings).open()
    return Run(Ring(config, Record(config, folder, CPU)), Silent(), DeferredInterrupt())


def alert(level, step):
    return Alert("energy_blowup", level, step, "energy_gap", 50.0, 20.0, 100, ("a", "b"))


def take(run, step, gap):
    """The row of a finished step has come."""
    run.record.next_step = step + 1
    run.record.write_row(step, {"energy_gap": gap}, {})
    run.follow()


@pytest.mark.parametrize("gap", [1.01e4, -1.01e4, math.nan, math.inf])
def test_a_run_is_lost_at_its_first_wide_gap(tmp_path, gap):
    run = run_of(tmp_path)
    run.task.stop_after = 1
    for step, own in enumerate((1e4, -1e4, gap, gap)):
        assert not run.is_over
        take(run, step, own)
    assert (run.record.diverged_at, run.is_over) == (2, True)
    notes = [note.split(":")[0] for note in run.reporter.notes]
    assert notes == ["diverged at step 2"]
    run.task.stop_after = None
    assert not run.is_over


def test_a_rollback_takes_a_divergence_back_and_marks_what_follows(tmp_path):
    run = run_of(tmp_path)
    record = run.record
    for step, gap in enumerate((0.0, 1.0, 2e4)):
        take(run, step, gap)
    assert record.diverged_at == 2
    record.roll_back({"restored_step": 1, "message": "back"})
    assert (record.next_step, record.diverged_at) == (1, None)
    record.on_alert(alert(Level.WARN, 1))
    take(run, 1, 3.0)
    assert record.first_alerts["WARN"]["attempt"] == 1
    take(run, 2, 2e4)
    record.roll_back({"restored_step": 3})
    assert record.diverged_at == 2


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("missing", TORCHRUN)
def test_half_of_torchruns_variables_are_refused(monkeypatch, missing):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2 but {missing} is not set"):
        joined_ranks("cpu").__enter__()


started, folder, seen = rank_fixtures(ranks_process.__name__, 3)


def test_they_know_who_they_are_and_tell_each_other(seen):
    assert [one["who"] for one in seen] == [[0, 3, True], [1, 3, False], [2, 3, False]]
    for one in seen:
        assert one["average"].tolist() == [1, float("inf")]
        # None of the first, one row of the second, two of the third.
        assert one["joined"].tolist() == [[10, 11], [20, 21], [22, 23]]
        assert one["all"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert one["first"] == {"rank": 0}


def test_checkpoints_are_those_that_all_have_also_when_one_is_damaged(seen):
    expected = [f"step-{step:08d}.rank{rank}of3.pt" for step in (12, 16) for rank in range(3)]
    for rank, one in enumerate(seen):
        found = one["checkpoints"]
        assert found["names"] == expected
        assert found["newest"] == pytest.approx(16 + rank / 10)
    for rank, one in enumerate(seen):
        found = one["checkpoints"]
        assert found["back"] == pytest.approx(12 + rank / 10)
        (warning,) = found["warnings"]
        assert "step-00000016.rank1of3.pt" in warning
        assert "passed over" in warning
        # Together there is none left, also for the rank whose own files are all well.
        for name in ("step-00000016.rank1of3.pt", "step-00000012.rank2of3.pt"):
            assert name in found["lost"]
