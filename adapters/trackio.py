"""Trackio: rows as metrics, alerts as the dashboard's alerts.

    run = trackio.init(project="jem")
    loss_fn, sample_q = guard(None, sample_q, sinks=[TrackioSink(run)])

``trackio show`` draws them; close the guard before ``run.finish()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebmguard.adapters._metrics import MetricsSink
from ebmguard.adapters._requires import requires
from ebmguard.errors import ConfigError

with requires("trackio", extra="trackio"):
    import trackio

__all__ = ["TrackioSink"]


class TrackioSink(MetricsSink):
    """Writes to a Trackio run, in a local database or a Space, in a thread of Trackio.

    - Scalars under ``guard/<tag>``, non-finite ones included, at the guard's step. The raw values
      behind histograms are not written. Of steps repeated after a rollback both rows stay.
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
        super().__init__(lambda metrics, step: run.log(metrics, step=step))
        self.run = run

    def _alert(self, title: str, level: str, record: Mapping[str, Any]) -> None:
        severity = trackio.AlertLevel[level]
        self.run.alert(title, record["message"], level=severity, step=record["step"])
