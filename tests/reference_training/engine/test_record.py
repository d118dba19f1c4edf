"""What a run remembers of its course: when it is lost, its first alerts, its rollbacks."""

from __future__ import annotations

import io
import math

import pytest
import torch

from ebmguard.alerts import Alert, Level
from ebmguard.reference_training.engine.record import Record
from ebmguard.reference_training.engine.task import Step
from ebmguard.sinks import read_jsonl
from tests.reference_training.engine.ring import Ring, RingConfig
from tests.reference_training.jem.parts import Silent

CPU = torch.device("cpu")


def record_of(out, **settings) -> Record:
    config, folder = RingConfig(out=out, device="cpu", **settings).open()
    record = Record(config, folder, CPU)
    record.reporter = Silent()
    record.task = Ring(config, record)
    return record


def alert(level, step):
    return Alert("energy_blowup", level, step, "energy_gap", 50.0, 20.0, 100, ("a", "b"))


def step_of(gap):
    return Step({"energy_gap": torch.tensor(gap), "loss": torch.tensor(0.5)})


@pytest.mark.parametrize("gap", [1.01e4, -1.01e4, math.nan, math.inf])
def test_a_run_is_lost_at_its_first_wide_gap(tmp_path, gap):
    record = record_of(tmp_path)
    record.task.stop_after = 1
    for step, own in enumerate((1e4, -1e4, gap, gap)):
        assert not record.finished
        record.after_step(step, step_of(own), {})
    assert (record.diverged_at, record.finished) == (2, True)
    notes = [note.split(":")[0] for note in record.reporter.notes]
    assert notes == ["diverged at step 2"]
    record.task.stop_after = None
    assert not record.finished
    record.close()


def test_the_first_alert_of_each_level_is_kept_and_pointed_out(tmp_path, monkeypatch):
    record, seen = record_of(tmp_path), []
    monkeypatch.setattr(record.task, "first_alert", lambda alert: seen.append(alert.step))
    for name, step in (("INFO", 1), ("WARN", 2), ("WARN", 3), ("ERROR", 4), ("ERROR", 5)):
        record.on_alert(alert(Level[name], step))
    assert record.first_alerts == {}  # a step is not over
    record.after_step(5, step_of(0.0), {})
    assert seen == [2, 4]
    assert {level: a["step"] for level, a in record.first_alerts.items()} == {"WARN": 2, "ERROR": 4}
    assert record.counts == {"INFO": 1, "WARN": 2, "ERROR": 2}
    assert record.reporter.states[-1][1]["alert"] == "ERROR energy_blowup @5"
    record.close()


def test_an_error_may_be_the_first_of_both_levels(tmp_path):
    record = record_of(tmp_path)
    for level, step in ((Level.ERROR, 7), (Level.WARN, 8)):
        record.on_alert(alert(level, step))
    record.after_step(8, step_of(0.0), {})
    assert {level: a["step"] for level, a in record.first_alerts.items()} == {"WARN": 7, "ERROR": 7}
    record.close()


def test_a_rollback_takes_a_divergence_back_and_marks_what_follows(tmp_path):
    record = record_of(tmp_path)
    for step, gap in enumerate((0.0, 1.0, 2e4)):
        record.after_step(step, step_of(gap), {})
    record.roll_back({"restored_step": 1, "message": "back"})
    assert (record.next_step, record.diverged_at) == (1, None)
    record.on_alert(alert(Level.WARN, 1))
    record.after_step(1, step_of(3.0), {})
    assert record.first_alerts["WARN"]["attempt"] == 1
    record.close()
    rows = read_jsonl(tmp_path / "training.jsonl")
    assert [(row["step"], row.get("attempt"), row["energy_gap"]) for row in rows] == [
        (0, None, 0.0),
        (1, None, 1.0),
        (2, None, 2e4),
        (1, 1, 3.0),
    ]


def test_state_survives_a_file_and_time_before_a_resume_counts(tmp_path):
    record = record_of(tmp_path / "a")
    record.on_alert(alert(Level.ERROR, 0))
    record.after_step(0, step_of(2e4), {})
    record.roll_back({"restored_step": 0})
    record.after_step(0, step_of(2e4), {})
    file = io.BytesIO()
    torch.save({**record.state_dict(), "elapsed": 1000.0}, file)
    file.seek(0)
    other = record_of(tmp_path / "b")
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.elapsed() >= 1000.0
    for state in (states := [record.state_dict(), other.state_dict()]):
        del state["elapsed"]
    assert states[0] == states[1]
    record.close()
