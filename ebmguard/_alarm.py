"""From a judged row to its consequences: records, words, the callback, and the action."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from .alerts import Alert, Detector, Level, error_for
from .monitor import Monitor

__all__ = ["Action", "Alarm"]

Action: TypeAlias = Literal["warn", "raise"]

_log = logging.getLogger("ebmguard")


class Alarm:
    """Judges rows, reports alerts at once, and keeps the action for a safe point.

    Args:
        monitor: whose sinks get the records.
        action: what an alert of level ERROR leads to.
        on_alert: called with every alert.

    Attributes:
        detector: the rules and their state.
        alerts: all alerts so far, oldest first.
    """

    def __init__(
        self, monitor: Monitor, action: Action, on_alert: Callable[[Alert], object] | None
    ) -> None:
        self.detector = Detector()
        self.alerts: list[Alert] = []
        self._monitor = monitor
        self._action = action
        self._on_alert = on_alert
        self._pending: Alert | None = None

    @property
    def is_ringing(self) -> bool:
        """Whether an ERROR's action waits for a safe point."""
        return self._pending is not None

    def judge(self, step: int, row: Mapping[str, float]) -> float:
        """Report what the rules say of a row.

        Returns:
            the highest level: 0, 1 (WARN) or 2 (ERROR).
        """
        alerts = [*_skipped_by_scaler(step, row), *self.detector.observe(step, row)]
        for alert in alerts:
            self.report(alert)
        return float(max((alert.level for alert in alerts), default=0))

    def report(self, alert: Alert) -> None:
        """Record an alert, say it, and call back."""
        self.alerts.append(alert)
        self._monitor.alert(alert.record())
        if alert.level is Level.WARN:
            _log.warning(alert.message)
        elif alert.level is Level.ERROR:
            _log.error(alert.message)
            if self._action == "raise" and self._pending is None:
                self._pending = alert
        if self._on_alert is not None:
            self._on_alert(alert)

    def safe_point(self) -> None:
        """Carry out a waiting action.

        Raises:
            DivergenceError: the typed error of the first ERROR, with ``action="raise"``.
        """
        if self._pending is not None:
            alert, self._pending = self._pending, None
            self._monitor.flush()
            raise error_for(alert)(alert)


def _skipped_by_scaler(step: int, row: Mapping[str, float]) -> list[Alert]:
    skipped = row.get("scaler/skipped", 0.0)
    if not skipped:
        return []
    return [
        Alert(
            rule="amp_skip",
            level=Level.INFO,
            step=step,
            tag="scaler/skipped",
            value=skipped,
            limit=0.0,
            window=0,
            remedies=("none: the GradScaler lowers its scale by itself", "train in bfloat16"),
        )
    ]
