"""From a judged row to its consequences: records, words, the callback, and the action."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from ..alerts import Alert, Judge, Level, error_for
from ..errors import ConfigError
from .rows import Monitor, Row

__all__ = ["Action", "Alarm"]

Action: TypeAlias = Literal["warn", "raise", "rollback"]

_log = logging.getLogger("ebmguard")
_LOUDNESS = {Level.WARN: logging.WARNING, Level.ERROR: logging.ERROR}


class Alarm:
    """Judges rows, reports alerts at once, and keeps the action for a safe point.

    Args:
        monitor: whose sinks get the records.
        action: what an alert of level ERROR leads to.
        on_alert: called with every alert.
        members: number of models of an ensemble; 0 for a single model.
        speaks: whether alerts are logged in words; of several ranks one does.

    Attributes:
        detector: the rules and their state; in an ensemble those of what its members share.
        members: the same for each member of an ensemble.
        alerts: all alerts so far, oldest first.
    """

    def __init__(
        self,
        monitor: Monitor,
        action: Action,
        on_alert: Callable[[Alert], object] | None,
        members: int = 0,
        *,
        speaks: bool = True,
    ) -> None:
        self.detector = Judge()
        self.members = [Judge() for _ in range(members)]
        self.alerts: list[Alert] = []
        self._monitor = monitor
        self._action = action
        self._on_alert = on_alert
        self._speaks = speaks
        self._pending: Alert | None = None
        self._judged: tuple[int | None, Row] = (None, {})

    @property
    def is_ringing(self) -> bool:
        """Whether an ERROR's action waits for a safe point."""
        return self._pending is not None

    def judge(self, step: int, row: Row, members: Sequence[Row] = ()) -> float:
        """Report what the rules say of a row.

        Args:
            step: its step.
            row: the row; of an ensemble the mean row, of which only what no member has is judged.
            members: the rows of an ensemble's members.

        Returns:
            the highest level: 0, 1 (WARN) or 2 (ERROR).
        """
        shared = row
        if members:
            own = members[0].keys() - {"beta_star"}  # which words the remedies
            shared = {tag: value for tag, value in row.items() if tag not in own}
        if step == self._judged[0]:
            shared = self._judged[1] | shared  # the row of a step comes with what is new alone
        self._judged = step, shared
        alerts = self.detector.observe(step, shared)
        if members:
            for i, (detector, each) in enumerate(zip(self.members, members, strict=True)):
                alerts += [replace(alert, member=i) for alert in detector.observe(step, each)]
        for alert in alerts:
            self.report(alert)
        return float(max((alert.level for alert in alerts), default=0))

    def report(self, alert: Alert) -> None:
        """Record an alert, say it, and call back."""
        self.alerts.append(alert)
        self._monitor.alert(alert.record())
        if self._speaks and alert.level > Level.INFO:
            _log.log(_LOUDNESS[alert.level], alert.message)
        if alert.level is Level.ERROR and self._action != "warn" and self._pending is None:
            self._pending = alert
        if self._on_alert is not None:
            self._on_alert(alert)

    def state_dict(self) -> dict[str, Any]:
        """The memory of the rules, in two entries: ``detector`` and ``members``."""
        return {
            "detector": self.detector.state_dict(),
            "members": [detector.state_dict() for detector in self.members],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: of other rules, or of another number of members. Nothing has changed then.
        """
        if len(state["members"]) != len(self.members):
            raise ConfigError(
                f"This is the state of a guard of {len(state['members'])} ensemble members, but "
                f"this one has {len(self.members)} (0 for a single model). Build the guard with "
                "the same model dimensions."
            )
        members = [Judge() for _ in self.members]
        for detector, own in zip(members, state["members"], strict=True):
            detector.load_state_dict(own)
        self.detector.load_state_dict(state["detector"])
        self.members = members
        self._pending = None  # of a course that is left
        self._judged = (None, {})

    def safe_point(self) -> None:
        """Raise what is waiting with ``action="raise"``.

        Raises:
            DivergenceError: the typed error of the first ERROR.
        """
        if self._action == "raise":
            alert = self.take()
            if alert is not None:
                self._monitor.flush()
                raise error_for(alert)(alert)

    def take(self) -> Alert | None:
        """The ERROR whose action waits, which then waits no longer."""
        alert, self._pending = self._pending, None
        return alert
