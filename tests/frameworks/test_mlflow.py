"""What the sink writes, read back by MLflow's own client from a database and from files."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

import ebmguard
from ebmguard.adapters.mlflow import MlflowSink
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


@pytest.fixture(params=["database", "files"])
def client(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> mlflow.MlflowClient:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"sqlite:///{tmp_path}/mlflow.db" if request.param == "database" else f"{tmp_path}/runs"
    return mlflow.MlflowClient(tracking_uri=uri)


@pytest.fixture
def run_id(client: mlflow.MlflowClient, tmp_path: Path) -> str:
    experiment = client.create_experiment("test", artifact_location=(tmp_path / "a").as_uri())
    return str(client.create_run(experiment).info.run_id)


def of_tag(client: mlflow.MlflowClient, run_id: str, tag: str) -> list[tuple[int, float]]:
    found = [(m.step, m.value) for m in client.get_metric_history(run_id, tag)]
    return sorted(found, key=lambda pair: pair[0])


def test_every_number_arrives(client, run_id, tmp_path):
    feed([MlflowSink(run_id, client=client)], tmp_path / "log")
    expected = lines(tmp_path / "log", "metrics")
    assert len(expected) == STEPS
    has_infinities = "sqlite" not in client.tracking_uri
    most = math.inf if has_infinities else sys.float_info.max
    for tag in expected[0]:
        if tag == "step":
            continue
        theirs = [
            (row["step"], math.copysign(most, row[tag]) if math.isinf(row[tag]) else row[tag])
            for row in expected
            if tag in row
        ]
        name = "acc_1" if tag == OWN else f"guard/{tag}"  # MLflow refuses an @
        assert_same(of_tag(client, run_id, name), theirs)
    assert math.isnan(of_tag(client, run_id, "guard/energy_gap")[57][1])
    assert of_tag(client, run_id, "guard/f_neg/max")[58][1] == most


def test_alerts_are_markers_and_tags_to_search_by(client, run_id, tmp_path):
    g = feed([MlflowSink(run_id, client=client)], tmp_path / "log")
    (alert,) = [a for a in g.alerts if a.rule == "nonfinite"]
    assert of_tag(client, run_id, "_alerts/ERROR_nonfinite") == [(alert.step, 2.0)]
    tags = client.get_run(run_id).data.tags
    assert tags["guard.alert.nonfinite"] == alert.message
    (experiment,) = client.search_experiments(filter_string="name = 'test'")
    for level, count in (("ERROR", 1), ("WARN", 0)):
        found = client.search_runs(
            [experiment.experiment_id], filter_string=f"tags.`guard.alert_level` = '{level}'"
        )
        assert len(found) == count


def test_the_level_is_the_highest_so_far(client, run_id):
    sink = MlflowSink(run_id, client=client)
    for level in ("INFO", "WARN", "INFO"):
        sink.write_alert(ALERT | {"level": level})
        sink.flush()
    assert client.get_run(run_id).data.tags["guard.alert_level"] == "WARN"


def test_both_passes_through_a_step_are_kept_after_a_rollback(client, run_id):
    sink = MlflowSink(run_id, client=client)
    for step in range(10):
        sink.write_row(step, {"ess": 0.1}, {})
    sink.write_recovery(RECOVERY)
    for step in range(4, 12):
        sink.write_row(step, {"ess": 0.9}, {})
    sink.flush()
    found = sorted(of_tag(client, run_id, "guard/ess"))
    assert found == sorted([(s, 0.1) for s in range(10)] + [(s, 0.9) for s in range(4, 12)])
    assert client.get_run(run_id).data.tags["guard.recovery"] == RECOVERY["message"]


class Failing:
    """A server that is away while `is_away`; counts what it is asked to take."""

    def __init__(self, client: mlflow.MlflowClient) -> None:
        self.client = client
        self.is_away = False
        self.requests: list[tuple[int, int]] = []

    def get_run(self, run_id: str) -> Any:
        return self.client.get_run(run_id)

    def log_batch(self, run_id: str, metrics: Any, tags: Any) -> None:
        if self.is_away and self.requests:
            raise mlflow.MlflowException("away")
        self.requests.append((len(metrics), len(tags)))
        self.client.log_batch(run_id, metrics, tags=tags)


def test_what_a_failing_server_has_not_taken_is_kept(client, run_id, caplog):
    server = Failing(client)
    sink = MlflowSink(run_id, client=server)
    patient = PatientSink(sink)
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
        assert of_tag(client, run_id, f"t{i}") == [(s, float(s)) for s in range(20)]
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


def test_a_run_that_is_nowhere(client):
    with pytest.raises(ConfigError, match="cannot find the run 'nowhere'"):
        MlflowSink("nowhere", client=client)


def test_training_is_what_it_was(client, run_id):
    assert_only_watches(MlflowSink(run_id, client=client))
