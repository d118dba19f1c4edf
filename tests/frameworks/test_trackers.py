"""What the sinks of W&B, MLflow and Trackio write, read back by the trackers' own functions."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import trackio
import wandb
from trackio.sqlite_storage import SQLiteStorage
from wandb.proto import wandb_internal_pb2

import ebmguard
from ebmguard.adapters.mlflow import MlflowSink
from ebmguard.adapters.trackio import TrackioSink
from ebmguard.adapters.wandb import WandbSink
from ebmguard.errors import ConfigError
from ebmguard.sinks import PatientSink
from tests.frameworks.sink_runs import OWN, STEPS, assert_only_watches, assert_same, feed, lines
from tests.sinks.parts import ALERT, RECOVERY

pytestmark = [
    # Of what MLflow asks of SQLAlchemy.
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
    # Its pool of connections is closed by the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]
Pairs = list[tuple[int, float]]


class Wandb:
    """An offline run, read back from its file by W&B's own messages."""

    own, most = OWN, math.inf
    left_out = frozenset({"step", "alert_level"})

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, kind: str) -> None:
        patch.setenv("WANDB_SILENT", "true")
        self.run = wandb.init(mode="offline", project="test", dir=folder)

    def sink(self) -> WandbSink:
        return WandbSink(self.run)

    def records(self) -> list[Any]:
        """The messages of the run's file, once its process has written the last."""
        self.run.finish()
        for _ in range(600):  # that is after finish() has returned
            found = list(messages(Path(self.run.settings.sync_file).read_bytes()))
            if found and found[-1].HasField("exit"):
                return found
            time.sleep(0.1)
        raise AssertionError("W&B has not written the end of its file.")

    def history(self) -> list[dict[str, Any]]:
        return [
            {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            for record in self.records()
            if record.WhichOneof("record_type") == "history"
        ]

    def of_tag(self, tag: str) -> Pairs:
        rows = self.history()
        return [(row["guard/step"], float(row[tag])) for row in rows if tag in row]

    def alerts(self) -> list[Any]:
        return [record.alert for record in self.records() if record.HasField("alert")]

    def end(self) -> None:
        self.run.finish()


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


class Mlflow:
    """A run in a database or in files, read back by MLflow's own client."""

    own = "acc_1"  # MLflow refuses an @
    left_out = frozenset({"step"})

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, kind: str) -> None:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        has_database = kind == "database"
        uri = f"sqlite:///{folder}/mlflow.db" if has_database else f"{folder}/runs"
        self.most = sys.float_info.max if has_database else math.inf
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        place = (folder / "a").as_uri()
        self.experiment = self.client.create_experiment("test", artifact_location=place)
        self.run_id = str(self.client.create_run(self.experiment).info.run_id)

    def sink(self) -> MlflowSink:
        return MlflowSink(self.run_id, client=self.client)

    def of_tag(self, tag: str) -> Pairs:
        found = [(m.step, m.value) for m in self.client.get_metric_history(self.run_id, tag)]
        return sorted(found, key=lambda pair: pair[0])

    @property
    def tags(self) -> Any:
        return self.client.get_run(self.run_id).data.tags

    def end(self) -> None:
        pass


class Trackio:
    """A run in Trackio's own database, read back by its own functions."""

    own, most = OWN, math.inf
    left_out = frozenset({"step"})

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, kind: str) -> None:
        self.folder = folder / "trackio"
        for module in ("utils", "sqlite_storage"):  # else the user's own
            patch.setattr(f"trackio.{module}.TRACKIO_DIR", self.folder)
        self.run = trackio.init(project="test", name="run", embed=False)

    def sink(self) -> TrackioSink:
        return TrackioSink(self.run)

    def of_tag(self, tag: str) -> Pairs:
        self.run.finish()
        rows = SQLiteStorage.get_logs("test", "run")
        return [(row["step"], row[tag]) for row in rows if tag in row]

    def alerts(self) -> list[Any]:
        return list(reversed(SQLiteStorage.get_alerts("test", "run")))

    def end(self) -> None:
        self.run.finish()
        assert list(self.folder.glob("*.db"))


@pytest.fixture
def tracker(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kind, *how = request.param
    tracker = kind(tmp_path, monkeypatch, *(how or [""]))
    yield tracker
    tracker.end()


TRACKERS = [(Wandb,), (Mlflow, "database"), (Mlflow, "files"), (Trackio,)]


def of(*kinds: type) -> pytest.MarkDecorator:
    """The trackers of these kinds; without one, all."""
    own = [x for x in TRACKERS if x[0] in kinds or not kinds]
    return pytest.mark.parametrize("tracker", own, indirect=True)


def assert_all_there(tracker: Any, folder: Path) -> None:
    """Every number that ``feed`` has written beside it is there."""
    expected = lines(folder, "metrics")
    assert len(expected) == STEPS

    def kept(x: float) -> float:
        return math.copysign(tracker.most, x) if math.isinf(x) else x

    for tag in expected[0].keys() - tracker.left_out:
        theirs = [(row["step"], kept(row[tag])) for row in expected if tag in row]
        assert_same(tracker.of_tag(tracker.own if tag == OWN else f"guard/{tag}"), theirs)
    assert math.isnan(tracker.of_tag("guard/energy_gap")[57][1])
    assert tracker.of_tag("guard/f_neg/max")[58][1] == tracker.most


@of(Mlflow, Trackio)
def test_every_number_arrives(tracker, tmp_path):
    feed([tracker.sink()], tmp_path / "log")
    assert_all_there(tracker, tmp_path / "log")


@of()
def test_alerts_are_markers_and_alerts_or_tags_of_the_run(tracker, tmp_path):
    g = feed([tracker.sink()], tmp_path / "log")
    (error,) = [a for a in g.alerts if a.rule == "nonfinite"]
    assert tracker.of_tag("_alerts/ERROR_nonfinite") == [(error.step, 2.0)]
    titles = [(f"{a.level.name} {a.rule}", a.level.name) for a in g.alerts]
    assert {"ERROR nonfinite", "ERROR energy_blowup"} <= {title for title, _ in titles}
    if isinstance(tracker, Wandb):
        assert [(a.title, a.level) for a in tracker.alerts()] == titles
        for shown, alert in zip(tracker.alerts(), g.alerts, strict=True):
            assert all(remedy in shown.text for remedy in alert.remedies)
    elif isinstance(tracker, Trackio):
        assert [(a["title"], a["level"].upper()) for a in tracker.alerts()] == titles
        texts = [(a["text"], a["step"]) for a in tracker.alerts()]
        assert texts == [(a.message, a.step) for a in g.alerts]
    else:
        assert tracker.tags["guard.alert.nonfinite"] == error.message
        for level, count in (("ERROR", 1), ("WARN", 0)):
            said = f"tags.`guard.alert_level` = '{level}'"
            found = tracker.client.search_runs([tracker.experiment], filter_string=said)
            assert len(found) == count


@of()
def test_both_passes_through_a_step_are_kept_after_a_rollback(tracker):
    sink = tracker.sink()
    for step in range(10):
        sink.write_row(step, {"ess": 0.1}, {})
    sink.write_recovery(RECOVERY)
    for step in range(4, 12):
        sink.write_row(step, {"ess": 0.9}, {})
    sink.flush()
    passes = [(s, 0.1) for s in range(10)] + [(s, 0.9) for s in range(4, 12)]
    assert sorted(tracker.of_tag("guard/ess")) == sorted(passes)
    said = RECOVERY["message"]
    if isinstance(tracker, Wandb):
        (alert,) = tracker.alerts()
        assert (alert.title, alert.text, alert.level) == ("Rollback 1", said, "WARN")
    elif isinstance(tracker, Trackio):
        (found,) = tracker.alerts()
        told = found["title"], found["text"], found["level"], found["step"]
        assert told == ("Rollback 1", said, "warn", RECOVERY["step"])
    else:
        assert tracker.tags["guard.recovery"] == said


@of()
def test_training_is_what_it_was(tracker):
    assert_only_watches(tracker.sink())


# -- W&B -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names_step", [True, False], ids=["step=", "no step"])
@pytest.mark.parametrize(("times", "every"), [(0, 1), (1, 1), (1, 10), (3, 1)])
@of(Wandb)
def test_every_row_arrives_whatever_the_trainer_logs(tracker, tmp_path, names_step, times, every):
    logged = []

    def on_step(step: int) -> None:
        for i in range(times if step % every == 0 else 0):
            # Under one step=, W&B keeps the last number of a name.
            if not names_step or i == times - 1:
                logged.append(step)
            tracker.run.log({"loss": step}, step=step if names_step else None)

    feed([tracker.sink()], tmp_path / "log", on_step=on_step)
    rows = tracker.history()
    tracker.history = lambda: rows  # read once
    assert_all_there(tracker, tmp_path / "log")
    # Nor has W&B refused any of the trainer's own.
    assert [row["loss"] for row in rows if "loss" in row] == logged


# -- MLflow ----------------------------------------------------------------------------------------


class Failing:
    """A server that is away while `is_away`; counts what it is asked to take."""

    def __init__(self, client: mlflow.MlflowClient) -> None:
        self.client, self.get_run = client, client.get_run
        self.is_away = False
        self.requests: list[tuple[int, int]] = []

    def log_batch(self, run_id: str, metrics: Any, tags: Any) -> None:
        if self.is_away and self.requests:
            raise mlflow.MlflowException("away")
        self.requests.append((len(metrics), len(tags)))
        self.client.log_batch(run_id, metrics, tags=tags)


@of(Mlflow)
def test_what_a_failing_server_has_not_taken_is_kept(tracker, caplog):
    server = Failing(tracker.client)
    patient = PatientSink(MlflowSink(tracker.run_id, client=server))
    for step in range(20):
        patient.write_row(step, {f"t{i}": float(step) for i in range(60)}, {})
    patient.write_alert(ALERT)
    server.is_away = True
    patient.flush()  # takes one request, and fails at the second
    assert "away" in caplog.text
    server.is_away = False
    patient.flush()
    assert server.requests == [(900, 3 - 1), (301, 0)]
    for i in (0, 59):
        assert tracker.of_tag(f"t{i}") == [(s, float(s)) for s in range(20)]
    patient.close()


def test_the_active_run_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
    with pytest.raises(ConfigError, match="No MLflow run is active"):
        MlflowSink()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        with mlflow.start_run() as run:
            g = ebmguard.guard(None, None, beta_star=0.5, sinks=[MlflowSink()])
            assert isinstance(g, ebmguard.Guard)
        assert mlflow.active_run() is None
        assert MlflowSink(run.info.run_id).run_id == run.info.run_id
    finally:
        mlflow.set_tracking_uri(None)
