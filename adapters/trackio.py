"""Trackio: rows as metrics, alerts as the dashboard's own alerts.

run = trackio.init(project="jem")
loss_fn, sample_q = guard(None, sample_q, beta_star=0.5, sinks=[TrackioSink(run)])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ebmguard.adapters._requires import requires
from ebmguard.errors import ConfigError
from ebmguard.sinks._text import LEVEL_NUMBERS, marker_tag
from ebmguard.sinks.protocol import TAG_PREFIX

with requires("trackio", extra="trackio"):
    import trackio

__all__ = ["TrackioSink"]


class TrackioSink:
    """Writes to a Trackio run, in a local database or a Space. A thread of Trackio's sends.

    - Scalars under ``guard/<tag>``, non-finite ones included, at the guard's step. The raw values
      behind histograms are not written. Of steps that come again after a rollback both rows stay.
    - An alert is the scalar ``_alerts/<LEVEL>_<rule>`` at its step, and an alert of the run, with
      the message as its text; Trackio prints it, and sends it to the run's webhook. A rollback is
      an alert of level WARN.

    Args:
        run: what ``trackio.init`` returned. It stays the caller's to finish.

    Raises:
        ConfigError: not a run.
    """

    def __init__(self, run: Any) -> None:
        if not isinstance(run, trackio.Run):
            raise ConfigError(
                f"run= is a {type(run).__name__}; expected what trackio.init(...) returned."
            )
        self.run = run

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Pass the scalars on."""
        self.run.log({TAG_PREFIX + tag: value for tag, value in scalars.items()}, step=step)

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """Mark the alert's step, and pass the alert on."""
        level, step = record["level"], record["step"]
        self.run.log({marker_tag(record): LEVEL_NUMBERS[level]}, step=step)
        self.run.alert(
            f"{level} {record['rule']}",
            record["message"],
            level=trackio.AlertLevel[level],
            step=step,
        )

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Pass the rollback on as an alert."""
        self.run.alert(
            f"Rollback {record['attempt']}",
            record["message"],
            level=trackio.AlertLevel.WARN,
            step=record["step"],
        )

    def flush(self) -> None:
        """Nothing: what Trackio has taken it sends and keeps by itself."""
