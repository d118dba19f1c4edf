"""MLflow: rows as metrics in batches, alerts as metrics and tags.

    with mlflow.start_run():
        loss_fn, sample_q = guard(None, sample_q, sinks=[MlflowSink()])

``mlflow.search_runs(filter_string="tags.`guard.alert_level` = 'ERROR'")`` finds the lost runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from ebmguard.adapters._metrics import MetricsSink
from ebmguard.adapters._requires import requires
from ebmguard.errors import ConfigError
from ebmguard.sinks import LEVEL_NUMBERS

with requires("mlflow", extra="mlflow"):
    import mlflow
    from mlflow.entities import Metric, RunTag

__all__ = ["MlflowSink"]

# One request may hold 1,000 numbers and tags together, and 100 tags.
_MOST_METRICS = 900
_MOST_TAGS = 100
# MLflow refuses other characters in the name of a metric, and with it all that is in the request.
_REFUSED = re.compile(r"[^\w.\- :/]")


class MlflowSink(MetricsSink):
    """Writes to an MLflow run. Rows wait for :meth:`flush`, which sends 900 numbers a request.

    - Scalars as the metrics ``guard/<tag>``, at the guard's step; what the trainer gave to
      ``g.log`` under those names, ``acc@1`` as ``acc_1``. The raw values behind histograms are
      not written. Of steps that are repeated after a rollback both values stay. NaN is kept.
      MLflow's databases store the largest double (±1.8e308) instead of infinities.
    - An alert is the metric ``_alerts/<LEVEL>_<rule>`` at its step, the tag
      ``guard.alert.<rule>`` with the latest message, and the tag ``guard.alert_level`` with the
      highest level so far. A rollback is the tag ``guard.recovery``, the run's verdict the tag
      ``guard.verdict``.

    A flush waits for the server as ``mlflow.log_metrics`` does, and does not where MLflow logs
    asynchronously (``MLFLOW_ENABLE_ASYNC_LOGGING``). What a failing flush has not sent is kept.

    Args:
        run_id: the run; None is the active one. It stays the caller's to end.
        client: of another tracking server than ``mlflow``'s present one.

    Raises:
        ConfigError: no run is active, or the server cannot find the run.
    """

    def __init__(
        self, run_id: str | None = None, *, client: mlflow.MlflowClient | None = None
    ) -> None:
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise ConfigError(
                    "No MLflow run is active. Make the sink inside `with mlflow.start_run():`, or "
                    "pass run_id=."
                )
            run_id = active.info.run_id
        super().__init__(self._keep)
        self.run_id: str = run_id
        self._client = client or mlflow.MlflowClient()
        self._metrics: list[Any] = []
        self._tags: dict[str, str] = {}
        self._level = ""
        try:
            self._client.get_run(run_id)
        except mlflow.MlflowException as error:
            raise ConfigError(
                f"MLflow cannot find the run {run_id!r}: {error}. Pass run_id= of a run that "
                "exists, and client= where it is on another server."
            ) from error

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """Keep the alert's marker and tags."""
        super().write_alert(record)
        level = record["level"]
        self._tags[f"guard.alert.{record['rule']}"] = record["message"]
        if LEVEL_NUMBERS[level] >= LEVEL_NUMBERS.get(self._level, -1):
            self._level = self._tags["guard.alert_level"] = level

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Keep the rollback's tag."""
        self._tags["guard.recovery"] = record["message"]

    def write_verdict(self, step: int, verdict: str) -> None:
        """Keep the run's verdict as a tag."""
        self._tags["guard.verdict"] = verdict

    def flush(self) -> None:
        """Send what was kept.

        Raises:
            OSError: the server does not take it; what it has not taken is kept for the next flush.
        """
        while self._metrics or self._tags:
            metrics = self._metrics[:_MOST_METRICS]
            tags = dict(list(self._tags.items())[:_MOST_TAGS])
            try:
                self._client.log_batch(
                    self.run_id, metrics, tags=[RunTag(*tag) for tag in tags.items()]
                )
            except mlflow.MlflowException as error:
                raise OSError(f"MLflow does not take what was measured: {error}") from error
            del self._metrics[: len(metrics)]
            for name in tags:
                del self._tags[name]

    def _keep(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._metrics += [
            Metric(_REFUSED.sub("_", name), value, now, step) for name, value in values.items()
        ]
