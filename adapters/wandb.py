"""Weights & Biases: rows as history, alerts as the service's alerts.

    run = wandb.init(project="jem")
    loss_fn, sample_q = guard(None, sample_q, sinks=[WandbSink(run)])

Charts under ``guard/`` have the guard's step as their axis, which goes back after a rollback.
W&B's step never does, so that both passes through a step are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ebmguard.adapters._metrics import MetricsSink
from ebmguard.adapters._requires import requires
from ebmguard.errors import ConfigError
from ebmguard.sinks import MARKER_PREFIX, TAG_PREFIX, alert_markdown, prefixed

with requires("wandb", extra="wandb"):
    import wandb

__all__ = ["WandbSink"]

_STEP = f"{TAG_PREFIX}step"
# W&B drops alerts of one title that come sooner; the guard's rules have a cool-down too.
_SECONDS_APART = 1


class WandbSink(MetricsSink):
    """Writes to a W&B run, online or offline. Nothing waits for the network: W&B sends by itself.

    - Scalars and histograms under ``guard/<tag>``, non-finite ones included; what the trainer gave
      to ``g.log``, under those names.
    - An alert is the scalar ``_alerts/<LEVEL>_<rule>`` at its step, and an alert of the run, which
      the service can send on. A rollback is an alert of level WARN.

    A trainer that logs to the same run without ``step=``, or with the iteration's, is not
    disturbed. With a smaller ``step=`` (epochs, say) W&B refuses its rows, since history never goes
    back: let it log that count as a metric, or give this sink another run,
    ``wandb.init(group=..., reinit="create_new")``.

    Args:
        run: what ``wandb.init`` returned. It stays the caller's to finish; close the guard before.

    Raises:
        ConfigError: not a run.
    """

    def __init__(self, run: Any) -> None:
        if not isinstance(run, wandb.Run):
            raise ConfigError(
                f"run= is a {type(run).__name__}; expected what wandb.init(...) returned."
            )
        super().__init__(self._add)
        self.run = run
        self._place = -1  # of the last row in the run's history
        run.define_metric(_STEP, hidden=True)
        for prefix in (TAG_PREFIX, MARKER_PREFIX):
            run.define_metric(f"{prefix}*", step_metric=_STEP)

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Pass the row on.

        Raises:
            OSError: the run is finished.
        """
        row: dict[str, Any] = {prefixed(tag): value for tag, value in scalars.items()}
        for tag, values in histograms.items():
            # A histogram cannot hold NaN. The row's nonfinite/* tags count those.
            drawn = [x for x in values if abs(x) < float("inf")]
            if drawn:
                row[TAG_PREFIX + tag] = wandb.Histogram(drawn)
        self._place = self._add(row, step)

    def _add(self, row: dict[str, Any], step: int) -> int:
        """Log the numbers, and return their place in the run's history."""
        self._require()
        # Rows of two steps never share a place, since the later one would overwrite the other.
        place: int = max(step, self.run.step, self._place + 1)
        self.run.log({_STEP: step, **row}, step=place)
        return place

    def _alert(self, title: str, level: str, record: Mapping[str, Any]) -> None:
        self._require()
        text = alert_markdown(record) if "remedies" in record else record["message"]
        self.run.alert(title, text, level=wandb.AlertLevel[level], wait_duration=_SECONDS_APART)

    def _require(self) -> None:
        # A finished run that is asked for its step times out after half a minute.
        if getattr(self.run, "_is_finished", False):
            raise OSError("The W&B run is finished. Call g.close() before run.finish().")
