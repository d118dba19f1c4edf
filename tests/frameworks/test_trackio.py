"""What the sink writes, read back from Trackio's own database by its own functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trackio
from trackio.sqlite_storage import SQLiteStorage

from ebmguard.adapters.trackio import TrackioSink
from ebmguard.errors import ConfigError
from tests.frameworks.sink_runs import OWN, STEPS, assert_only_watches, assert_same, feed, lines
from tests.sinks.parts import RECOVERY


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "trackio"
    for module in ("utils", "sqlite_storage"):  # else the user's own
        monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", folder)
    run = trackio.init(project="test", name="run", embed=False)
    yield run
    run.finish()
    assert list(folder.glob("*.db"))


def of_tag(run: Any, tag: str) -> list[tuple[int, float]]:
    run.finish()
    rows = SQLiteStorage.get_logs("test", "run")
    return [(row["step"], row[tag]) for row in rows if tag in row]


def test_every_number_arrives(run, tmp_path):
    feed([TrackioSink(run)], tmp_path / "log")
    expected = lines(tmp_path / "log", "metrics")
    assert len(expected) == STEPS
    for tag in expected[0]:
        if tag != "step":
            theirs = [(row["step"], row[tag]) for row in expected if tag in row]
            assert_same(of_tag(run, tag if tag == OWN else f"guard/{tag}"), theirs)
    assert math.isnan(of_tag(run, "guard/energy_gap")[57][1])
    assert of_tag(run, "guard/f_neg/max")[58][1] == math.inf


def test_alerts_are_markers_and_alerts_of_the_run(run, tmp_path):
    g = feed([TrackioSink(run)], tmp_path / "log")
    (error,) = [a for a in g.alerts if a.rule == "nonfinite"]
    assert of_tag(run, "_alerts/ERROR_nonfinite") == [(error.step, 2)]
    found = [
        (a["level"], a["title"], a["text"], a["step"])
        for a in reversed(SQLiteStorage.get_alerts("test", "run"))
    ]
    assert found == [
        (a.level.name.lower(), f"{a.level.name} {a.rule}", a.message, a.step) for a in g.alerts
    ]


def test_both_passes_through_a_step_are_kept_after_a_rollback(run):
    sink = TrackioSink(run)
    for step in range(10):
        sink.write_row(step, {"ess": 0.1}, {})
    sink.write_recovery(RECOVERY)
    for step in range(4, 12):
        sink.write_row(step, {"ess": 0.9}, {})
    found = of_tag(run, "guard/ess")
    assert sorted(found) == sorted([(s, 0.1) for s in range(10)] + [(s, 0.9) for s in range(4, 12)])
    (alert,) = SQLiteStorage.get_alerts("test", "run")
    assert (alert["title"], alert["text"], alert["level"], alert["step"]) == (
        "Rollback 1",
        RECOVERY["message"],
        "warn",
        RECOVERY["step"],
    )


def test_only_a_run_is_taken():
    with pytest.raises(ConfigError, match=r"trackio\.init"):
        TrackioSink("project")


def test_training_is_what_it_was(run):
    assert_only_watches(TrackioSink(run))
