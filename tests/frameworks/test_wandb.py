"""What the sink writes into an offline run, read back from its file by W&B's own messages."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from ebmguard.adapters.wandb import WandbSink
from ebmguard.errors import ConfigError
from ebmguard.sinks import PatientSink
from tests.frameworks.sink_runs import OWN, STEPS, assert_only_watches, assert_same, feed, lines
from tests.sinks.parts import ALERT, RECOVERY


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", project="test", dir=tmp_path)
    yield run
    run.finish()


def records(run: Any) -> list[Any]:
    """The messages of a run's file, once its process has written the last."""
    run.finish()
    for _ in range(600):  # that is after finish() has returned
        found = list(messages(Path(run.settings.sync_file).read_bytes()))
        if found and found[-1].HasField("exit"):
            return found
        time.sleep(0.1)
    raise AssertionError("W&B has not written the end of its file.")


def messages(data: bytes) -> Iterator[Any]:
    """A log of LevelDB's format behind a header of seven bytes."""
    at, part = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:  # no header fits into the rest of a block
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):  # its process is still writing it
            return
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def history(run: Any) -> list[dict[str, Any]]:
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for record in records(run)
        if record.WhichOneof("record_type") == "history"
    ]


def of_tag(rows: list[dict[str, Any]], tag: str) -> list[tuple[int, float]]:
    return [(row["guard/step"], float(row[tag])) for row in rows if tag in row]


@pytest.mark.parametrize("names_step", [True, False], ids=["step=", "no step"])
@pytest.mark.parametrize(("times", "every"), [(0, 1), (1, 1), (1, 10), (3, 1)])
def test_every_row_arrives_whatever_the_trainer_logs(run, tmp_path, names_step, times, every):
    logged = []

    def on_step(step: int) -> None:
        for i in range(times if step % every == 0 else 0):
            # Under one step=, W&B keeps the last number of a name.
            if not names_step or i == times - 1:
                logged.append(step)
            run.log({"loss": step}, step=step if names_step else None)

    feed([WandbSink(run)], tmp_path, on_step=on_step)
    rows, expected = history(run), lines(tmp_path, "metrics")
    assert len(expected) == STEPS
    for tag in expected[0]:
        if tag in ("step", "alert_level"):
            continue
        theirs = [(row["step"], row[tag]) for row in expected if tag in row]
        assert_same(of_tag(rows, tag if tag == OWN else f"guard/{tag}"), theirs)
    assert math.isnan(of_tag(rows, "guard/energy_gap")[57][1])
    assert of_tag(rows, "guard/f_neg/max")[58][1] == math.inf
    # Nor has W&B refused any of the trainer's own.
    assert [row["loss"] for row in rows if "loss" in row] == logged


def test_the_axis_is_the_guards_step(run):
    WandbSink(run)
    defined = [record.metric for record in records(run) if record.HasField("metric")]
    assert {metric.glob_name: metric.step_metric for metric in defined if metric.glob_name} == {
        "guard/*": "guard/step",
        "_alerts/*": "guard/step",
    }


def test_alerts_are_markers_and_alerts_of_the_run(run, tmp_path):
    g = feed([WandbSink(run)], tmp_path)
    raised = [record.alert for record in records(run) if record.HasField("alert")]
    assert [(a.title, a.level) for a in raised] == [
        (f"{alert.level.name} {alert.rule}", alert.level.name) for alert in g.alerts
    ]
    assert {"ERROR nonfinite", "ERROR energy_blowup"} <= {a.title for a in raised}
    for shown, alert in zip(raised, g.alerts, strict=True):
        assert all(remedy in shown.text for remedy in alert.remedies)
    (error,) = [a for a in g.alerts if a.rule == "nonfinite"]
    assert of_tag(history(run), "_alerts/ERROR_nonfinite") == [(error.step, 2.0)]


def test_both_passes_through_a_step_are_kept_after_a_rollback(run):
    sink = WandbSink(run)
    for step in range(10):
        sink.write_row(step, {"ess": 0.1}, {})
    sink.write_recovery(RECOVERY)
    for step in range(4, 12):
        sink.write_row(step, {"ess": 0.9}, {})
    found = of_tag(history(run), "guard/ess")
    assert found == [(s, 0.1) for s in range(10)] + [(s, 0.9) for s in range(4, 12)]
    (alert,) = [record.alert for record in records(run) if record.HasField("alert")]
    assert (alert.title, alert.text, alert.level) == ("Rollback 1", RECOVERY["message"], "WARN")


def test_histograms_hold_what_can_be_drawn(run):
    sink = WandbSink(run)
    values = [0.0, 1.0, 1.0, 2.0, math.nan, math.inf]
    sink.write_row(0, {}, {"f_pos": values, "f_neg": [math.nan]})
    (row,) = history(run)
    assert sum(row["guard/f_pos/values"]) == 4
    assert (row["guard/f_pos/bins"][0], row["guard/f_pos/bins"][-1]) == (0.0, 2.0)
    assert not any(name.startswith("guard/f_neg") for name in row)


def test_rows_after_the_end_of_the_run_are_reported_and_end_nothing(run, caplog):
    sink = WandbSink(run)
    patient = PatientSink(sink)
    run.finish()
    with pytest.raises(OSError, match="run is finished"):
        sink.write_alert(ALERT)
    with pytest.raises(OSError, match="run is finished"):
        sink.write_recovery(RECOVERY)
    patient.write_row(0, {"ess": 1.0}, {})
    patient.close()
    assert "Call g.close() before run.finish()" in caplog.text
    assert "not taken" in caplog.text


def test_only_a_run_is_taken():
    with pytest.raises(ConfigError, match=r"wandb\.init"):
        WandbSink("project")


def test_training_is_what_it_was(run):
    assert_only_watches(WandbSink(run))
