"""Loggers that take a dict of numbers and a step, used as a sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebmguard.sinks import LEVEL_NUMBERS, marker_tag, prefixed

__all__ = ["MetricsSink"]


class MetricsSink:
    """Passes every row on as one dict, the guard's numbers with the prefix ``guard/``.

    An alert is logged as the number of its level under ``_alerts/<LEVEL>_<rule>``. Histograms are
    dropped. A rollback shows in the rows' ``recovery/attempt``; steps that are repeated after it
    are logged again.

    Args:
        log: called as ``log(metrics, step)``. The caller closes the logger behind it.
    """

    def __init__(self, log: Callable[[dict[str, float], int], object]) -> None:
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
        """Mark the alert's step."""
        self._log({marker_tag(record): LEVEL_NUMBERS[record["level"]]}, record["step"])

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing: the logger decides when it writes."""
