"""What every sink does: each test runs over all sinks of one table, or all that write files."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from ebmguard.adapters.webhook import WebhookSink
from ebmguard.errors import ConfigError
from ebmguard.sinks import (
    JsonlSink,
    PatientSink,
    Sink,
    TensorBoardSink,
    Writer,
    as_sink,
    read_jsonl,
)
from tests import forks
from tests.full_disk import room_of
from tests.sinks.parts import ALERT, RECOVERY, load, scalars, texts

ROLLBACK = RECOVERY | {"restored_step": 8}  # no row here is of a step that comes again


@dataclass
class Seen:
    """What was read back."""

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    alerts: list[tuple[int, str]] = field(default_factory=list)
    rollbacks: str = ""

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


def read_lines(folder: Path) -> Seen:
    rows = [(row.pop("step"), row) for row in read_jsonl(folder / "metrics.jsonl")]
    alerts = [(x["step"], f"{x['level']}_{x['rule']}") for x in read_jsonl(folder / "alerts.jsonl")]
    return Seen(rows, alerts, (folder / "recovery.jsonl").read_text())


def read_events(folder: Path) -> Seen:
    events = load(folder)
    rows: dict[int, dict[str, float]] = {}
    alerts, rollbacks = [], ""
    for tag in events.Tags()["tensors"]:
        if tag.startswith("_alerts/"):
            alerts += [(step, tag.removeprefix("_alerts/")) for step, _ in scalars(folder, tag)]
        elif tag == "guard/recovery":
            rollbacks = texts(events, tag)[-1]
        elif events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            for step, value in scalars(folder, tag):
                rows.setdefault(step, {})[tag.removeprefix("guard/")] = value
    return Seen(sorted(rows.items(), key=lambda item: item[0]), alerts, rollbacks)


@dataclass(frozen=True)
class Kind:
    """One sink, and how to read back what it wrote into a folder."""

    make: Callable[[Path], Sink]
    read: Callable[[Path], Seen]
    shows_rollbacks: bool = True


# Those that keep what they take in memory until a flush, and append it to a file.
FILES = {
    "jsonl": Kind(JsonlSink, read_lines),
    "tensorboard": Kind(TensorBoardSink, read_events),
    "patient jsonl": Kind(lambda folder: PatientSink(JsonlSink(folder)), read_lines),
    "patient tensorboard": Kind(lambda folder: PatientSink(TensorBoardSink(folder)), read_events),
}
LOGGER = Kind(lambda folder: as_sink(SummaryWriter(str(folder))), read_events, False)
KINDS = FILES | {"summary writer": LOGGER}
each = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_file = pytest.mark.parametrize("kind", FILES.values(), ids=FILES)


def row(sink: Sink, step: int) -> None:
    sink.write_row(step, {"a": step / 8, "f_pos/median": -float(step)}, {})


@pytest.mark.parametrize(
    "make", [*(kind.make for kind in KINDS.values()), lambda _: WebhookSink("https://localhost/")]
)
def test_it_is_a_sink_and_is_taken_as_it_is(make: Callable[[Path], Sink], tmp_path: Path) -> None:
    sink = make(tmp_path)
    assert isinstance(sink, Sink)
    assert as_sink(sink) is sink


@each
def test_rows_alerts_and_rollbacks_come_back(kind: Kind, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "run"
    sink = kind.make(folder)
    for step in (5, 6):
        row(sink, step)
    sink.write_alert(ALERT)
    row(sink, 7)
    sink.write_recovery(ROLLBACK)
    sink.flush()
    seen = kind.read(folder)
    assert seen.rows == [(s, {"a": s / 8, "f_pos/median": -float(s)}) for s in (5, 6, 7)]
    assert seen.alerts == [(7, "ERROR_energy_blowup")]
    assert (RECOVERY["message"] in seen.rollbacks) == kind.shows_rollbacks


@each
def test_non_finite_values_are_kept(kind: Kind, tmp_path: Path) -> None:
    sink = kind.make(tmp_path)
    for step, value in enumerate((math.nan, math.inf, -math.inf)):
        sink.write_row(step, {"a": value}, {"f_pos": [value, 1.0]})
    sink.write_alert(ALERT | {"value": math.nan, "limit": -math.inf})
    sink.flush()
    seen = kind.read(tmp_path)
    values = [found["a"] for _, found in seen.rows]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]
    assert len(seen.alerts) == 1


@each_file
def test_nothing_is_written_before_a_flush_and_nothing_twice(kind: Kind, tmp_path: Path) -> None:
    sink = kind.make(tmp_path)
    row(sink, 0)
    sink.write_alert(ALERT)
    sink.write_recovery(ROLLBACK)
    assert kind.read(tmp_path) == Seen()
    sink.flush()
    sink.flush()
    seen = kind.read(tmp_path)
    assert (len(seen.rows), len(seen.alerts)) == (1, 1)
    assert seen.rollbacks.count(RECOVERY["message"]) == 1


@each_file
def test_after_a_full_disk_it_goes_on_at_the_very_byte(kind: Kind, tmp_path: Path) -> None:
    sink = kind.make(tmp_path)
    for step in range(10):
        row(sink, step)
    with room_of(max(path.stat().st_size for path in tmp_path.iterdir()) + 55):
        if isinstance(sink, PatientSink):
            sink.flush()
        else:
            with pytest.raises(OSError, match="File too large"):
                sink.flush()
    assert len(kind.read(tmp_path).rows) < 10
    row(sink, 10)
    sink.flush()
    assert kind.read(tmp_path).steps == list(range(11))


@each_file
def test_a_folder_that_vanishes_and_comes_back(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    sink = kind.make(folder)
    patient = sink if isinstance(sink, PatientSink) else PatientSink(sink)
    row(patient, 0)
    patient.flush()
    folder.rename(tmp_path / "away")
    for step in (1, 2):
        row(patient, step)
        patient.flush()
    (tmp_path / "away").rename(folder)
    row(patient, 3)
    patient.flush()
    assert kind.read(folder).steps == [0, 1, 2, 3]
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1


def test_a_killed_process_loses_only_what_came_after_its_last_flush(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from ebmguard.sinks import Writer\n"
        "writer = Writer([], flush_every=10, folder=sys.argv[1])\n"
        "for step in range(25):\n"
        "    writer.write(step, {'a': float(step)}, {})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = forks.run("-c", script, str(tmp_path))
    assert done.returncode == -signal.SIGKILL
    for read in (read_lines, read_events):
        assert read(tmp_path).rows == [(step, {"a": float(step)}) for step in range(20)]


@pytest.mark.parametrize(
    "make",
    [
        *(kind.make for kind in FILES.values()),
        lambda folder: Writer([], flush_every=1, folder=folder),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_at_construction(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/self/none")):
        with pytest.raises(
            ConfigError, match=rf"log folder .*{folder.name}.* cannot be written"
        ) as e:
            make(folder)
        assert "Pass another log_dir" in str(e.value)
