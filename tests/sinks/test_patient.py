"""What can be passed as a sink, and one that fails for a while, or for good."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.sinks import PatientSink, Sink, as_sink, writer
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
    assert "everything was written" in caplog.records[-1].getMessage()


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


def test_other_errors_are_bugs_and_are_raised() -> None:
    class Wrong(Memory):
        def flush(self) -> None:
            raise ValueError("a bug")

    sink = PatientSink(Wrong())
    row(sink, 0)
    with pytest.raises(ConfigError, match="Wrong raised ValueError: a bug"):
        sink.flush()
    sink.close()  # once is enough


# -- what can be passed as a sink ------------------------------------------------------------------


class BareLogger:
    """The smallest logger."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.calls.append((tag, value, step))


class FullLogger(BareLogger):
    def add_text(self, tag: str, text: str, step: int) -> None:
        self.calls.append((tag, text, step))

    def add_histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
        self.calls.append((tag, values.tolist(), step))

    def flush(self) -> None:
        self.calls.append("flush")


@pytest.mark.parametrize("logger", [BareLogger(), FullLogger()])
def test_a_logger_with_add_scalar_is_wrapped_and_all_that_it_can_do_is_used(
    logger: BareLogger,
) -> None:
    sink = as_sink(logger)
    samples = {"f_pos": [1.0, math.nan, 2.0, math.inf], "f_neg": [math.nan]}
    sink.write_row(4, {"ess": 0.5, "loss": math.inf}, samples)
    sink.write_alert(ALERT | {"level": "WARN"})
    sink.write_recovery(RECOVERY)
    sink.flush()
    texts = [call for call in logger.calls if call[0] == "guard/alerts"]
    rest = [call for call in logger.calls if call not in texts]
    row = [("guard/ess", 0.5, 4), ("guard/loss", math.inf, 4)]
    marker = ("_alerts/WARN_energy_blowup", 1, 7)
    if not isinstance(logger, FullLogger):
        assert (rest, texts) == ([*row, marker], [])
        return
    assert rest == [*row, ("guard/f_pos", [1.0, 2.0], 4), marker, "flush"]
    ((_, text, step),) = texts
    assert step == 7
    assert "WARN energy_blowup" in text
    assert "raise beta_star" in text


class Half:
    def write_row(self, *args: Any) -> None:
        pass

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (object(), "of type object, which is no sink"),
        (None, "of type NoneType, which is no sink"),
        (Half(), "It lacks write_alert, write_recovery"),
        (Memory, r"the class Memory.*Pass Memory\(\.\.\.\)"),
        ("runs/a", r"the path 'runs/a'.*log_dir=path"),
        (Path("runs/a"), r"the path 'runs/a'.*log_dir=path"),
    ],
)
def test_everything_else_is_refused_with_the_fix(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_sink(wrong)
