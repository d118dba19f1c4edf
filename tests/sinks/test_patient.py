"""A sink that fails for a while, or for good."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from ebmguard.errors import ConfigError
from ebmguard.sinks import PatientSink, Sink, writer
from tests.parts import Memory
from tests.sinks.parts import ALERT, RECOVERY


class Disk(Memory):
    """A sink whose disk can be full: methods named in ``full`` raise, and take nothing.

    What it takes is on the disk after a flush only, as in the sinks that are built in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full: set[str] = set()
        self.on_disk = 0

    def _room(self, method: str) -> None:
        if method in self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write_row(self, *args: Any) -> None:
        self._room("write_row")
        super().write_row(*args)

    def write_alert(self, record: Mapping[str, Any]) -> None:
        self._room("write_alert")
        super().write_alert(record)

    def flush(self) -> None:
        self._room("flush")
        self.on_disk = len(self.rows)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


def row(sink: Sink, step: int) -> None:
    values = {"a": float(step)}
    sink.write_row(step, values, {"f_pos": [1.0]} if step == 4 else {})
    values["a"] = -1.0  # its owner's to change


@pytest.mark.parametrize("full", [{"flush"}, {"write_row"}, {"write_row", "write_alert", "flush"}])
def test_nothing_is_lost_and_nothing_twice_over_a_full_disk(
    full: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    sink = PatientSink(disk)
    for step in range(10):
        if step == 3:
            disk.full = full
        if step == 8:
            disk.full = set()
        row(sink, step)
        if step == 5:
            sink.write_alert(ALERT)
            sink.write_recovery(RECOVERY)
        sink.flush()
    sink.close()
    assert disk.rows == [(step, {"a": float(step)}) for step in range(10)]
    assert disk.on_disk == 10
    assert disk.histograms == [(4, {"f_pos": [1.0]})]
    assert disk.alerts == [ALERT]
    assert disk.recoveries == [RECOVERY]
    (said,) = errors(caplog)
    assert "Disk cannot write" in said
    assert "No space left on device" in said
    assert "takes its rows again: everything was written" in caplog.records[-1].getMessage()


def test_a_second_failure_is_said_again(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    sink = PatientSink(disk)
    for full in ({"flush"}, set(), {"flush"}, set()):
        disk.full = full
        row(sink, 0)
        sink.flush()
    assert len(errors(caplog)) == 2


def test_a_disk_that_fills_up_again_in_the_middle_keeps_the_order() -> None:
    disk = Disk()
    sink = PatientSink(disk)
    row(sink, 0)
    disk.full = {"flush"}
    sink.flush()
    for step in range(1, 4):
        row(sink, step)
    sink.write_alert(ALERT)
    row(sink, 4)
    disk.full = {"write_alert"}
    sink.flush()
    assert disk.steps == [0, 1, 2, 3]
    disk.full = set()
    sink.flush()
    assert disk.steps == [0, 1, 2, 3, 4]
    assert disk.alerts == [ALERT]
    assert disk.on_disk == 5


def test_what_is_kept_has_a_bound_and_alerts_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "_KEPT", 5)
    disk = Disk()
    sink = PatientSink(disk)
    disk.full = {"flush"}
    row(sink, 0)
    sink.flush()
    sink.write_alert(ALERT)
    for step in range(1, 10):
        row(sink, step)
    sink.write_recovery(RECOVERY)
    disk.full = set()
    sink.flush()
    # Row 0 was the sink's already; of the others the last three fit beside alert and rollback.
    assert disk.steps == [0, 7, 8, 9]
    assert (disk.alerts, disk.recoveries) == ([ALERT], [RECOVERY])
    assert "all but the 6 oldest rows was written" in caplog.records[-1].getMessage()


def test_the_end_says_what_was_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "_KEPT", 4)
    disk = Disk()
    sink = PatientSink(disk)
    row(sink, 0)
    sink.flush()
    disk.full = {"flush"}
    row(sink, 1)
    sink.flush()
    sink.write_alert(ALERT)
    for step in range(2, 7):
        row(sink, step)
    sink.close()
    first, last = errors(caplog)
    assert "cannot write" in first
    # Rows 1 to 6 and the alert: one in the sink, four kept, two dropped.
    assert "up to 7 rows and alerts until the end, among them 1 alerts" in last


def test_the_end_is_silent_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    sink = PatientSink(Memory())
    row(sink, 0)
    sink.close()
    assert not caplog.records


def test_other_errors_are_bugs_and_are_raised() -> None:
    class Wrong(Memory):
        def flush(self) -> None:
            raise ValueError("a bug")

    sink = PatientSink(Wrong())
    row(sink, 0)
    with pytest.raises(ConfigError, match="Wrong raised ValueError: a bug"):
        sink.flush()
    sink.close()  # once is enough


def test_a_sink_that_has_all_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    sink = PatientSink(disk)
    row(sink, 0)
    sink.flush()
    disk.full = {"flush"}  # as of a logger that its owner has closed
    sink.flush()
    sink.close()
    assert not errors(caplog)
