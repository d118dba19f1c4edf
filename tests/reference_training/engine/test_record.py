"""What a run remembers of its course: when it is lost, its first alerts, its rollbacks."""

from __future__ import annotations

import io
import math

import pytest
import torch

from ebmguard.alerts import Alert, Level
from ebmguard.reference_training.engine.interrupt import DeferredInterrupt
from ebmguard.reference_training.engine.loop import Run
from ebmguard.reference_training.engine.record import Record
from tests.reference_training.engine.ring import Ring, RingConfig
from tests.reference_training.jem.parts import Silent

CPU = torch.device("cpu")


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


def test_the_first_alert_of_each_level_is_kept_and_pointed_out(tmp_path, monkeypatch):
    run, seen = run_of(tmp_path), []
    record = run.record
    monkeypatch.setattr(run.task, "first_alert", lambda alert: seen.append(alert.step))
    for name, step in (("INFO", 1), ("WARN", 2), ("WARN", 3), ("ERROR", 4), ("ERROR", 5)):
        record.on_alert(alert(Level[name], step))
    assert record.first_alerts == {}  # a step is not over
    run.follow()
    assert seen == [2, 4]
    assert {level: a["step"] for level, a in record.first_alerts.items()} == {"WARN": 2, "ERROR": 4}
    assert record.counts == {"INFO": 1, "WARN": 2, "ERROR": 2}
    assert run.task.shown({})["alert"] == "ERROR energy_blowup @5"


def test_an_error_may_be_the_first_of_both_levels(tmp_path):
    record = run_of(tmp_path).record
    for level, step in ((Level.ERROR, 7), (Level.WARN, 8)):
        record.on_alert(alert(level, step))
    assert [each.step for each in record.take_alerts()] == [7]
    assert {level: a["step"] for level, a in record.first_alerts.items()} == {"WARN": 7, "ERROR": 7}


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


def test_state_survives_a_file_and_time_before_a_resume_counts(tmp_path):
    run = run_of(tmp_path / "a")
    record = run.record
    record.on_alert(alert(Level.ERROR, 0))
    take(run, 0, 2e4)
    record.roll_back({"restored_step": 0})
    take(run, 0, 2e4)
    file = io.BytesIO()
    torch.save({**record.state_dict(), "elapsed": 1000.0}, file)
    file.seek(0)
    other = run_of(tmp_path / "b").record
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.elapsed() >= 1000.0
    for state in (states := [record.state_dict(), other.state_dict()]):
        del state["elapsed"]
    assert states[0] == states[1]
