"""Loggers that take a dict of numbers and a step, used as a sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebmguard.sinks import LEVEL_NUMBERS, Sink, marker_tag, prefixed

__all__ = ["MetricsSink"]


class MetricsSink(Sink):
    """Passes every row on as one dict, the guard's numbers with the prefix ``guard/``.

    An alert is logged as the number of its level under ``_alerts/<LEVEL>_<rule>``. Histograms are
    dropped. A rollback shows in the rows' ``recovery/attempt``; steps that are repeated after it
    are logged again.

    Args:
        log: called as ``log(metrics, step)``. The caller closes the logger behind it.
    """

    def __init__(self, log: Callable[[dict[str, Any], int], object]) -> None:
        self._log = log

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Pass the numbers on."""
        self._log({prefixed(tag): value for tag, value in scalars.items()}, step)

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """Mark the alert's step, and pass the alert on."""
        self._log({marker_tag(record): LEVEL_NUMBERS[record["level"]]}, record["step"])
        self._alert(f"{record['level']} {record['rule']}", record["level"], record)

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Pass the rollback on."""
        self._alert(f"Rollback {record['attempt']}", "WARN", record)

    def _alert(self, title: str, level: str, record: Mapping[str, Any]) -> None:
        """Raise an alert of the tracker, if it has alerts."""
