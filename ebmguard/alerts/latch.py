"""Hysteresis and cool-down: one blow-up gives one WARN and one ERROR, not a hundred alerts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .alert import Level

__all__ = ["Latch"]


@dataclass
class Latch:
    """Whether a rule is active, and whether its present level should be reported now.

    An episode begins when the rule first reports WARN or more, and ends after ``calm_steps``
    observations in a row inside the tighter, calm band. In between the rule is active, and each
    level is reported once. An ERROR is reported at once, whether it opens the episode or escalates
    it. A WARN that opens a new episode waits until ``cooldown`` observations have passed since the
    last report; if the episode is still going on by then, it is reported late rather than never.
    An INFO belongs to no episode: it makes nothing active and is reported once.

    Attributes:
        calm_steps: observations inside the calm band that end an episode.
        cooldown: observations between a report and a WARN that opens a new episode.
        active: highest level of the current episode, None outside episodes.
        reported: highest level reported in the current episode.
        calm: observations inside the calm band so far.
        since_report: observations since the last report of WARN or more, None before any.
        informed: whether an INFO has been reported.
    """

    calm_steps: int
    cooldown: int
    active: Level | None = None
    reported: Level | None = None
    calm: int = 0
    since_report: int | None = None
    informed: bool = False

    def update(self, level: Level | None, calm: bool | None) -> bool:
        """Take one observation; say whether ``level`` is to be reported now.

        Args:
            level: what the rule says of this observation, None for nothing.
            calm: whether the statistic is inside the tighter band that ends an episode; None
                where the observation does not tell, which changes nothing.
        """
        if self.since_report is not None:
            self.since_report += 1
        if level is None:
            if calm is not None:
                self._rest(calm)
            return False
        self.calm = 0
        if level is Level.INFO:
            self.informed, news = True, not self.informed
            return news
        if self.active is None or level > self.active:
            self.active = level
        if self.reported is not None and level <= self.reported:
            return False
        rested = self.since_report is None or self.since_report >= self.cooldown
        if level < Level.ERROR and not rested:
            return False
        self.reported = level
        self.since_report = 0
        return True

    def _rest(self, calm: bool) -> None:
        self.calm = self.calm + 1 if calm else 0
        if self.calm >= self.calm_steps:
            self.active = self.reported = None

    def state_dict(self) -> dict[str, Any]:
        """The latch as JSON-able data."""
        return {
            "active": None if self.active is None else self.active.name,
            "reported": None if self.reported is None else self.reported.name,
            "calm": self.calm,
            "since_report": self.since_report,
            "informed": self.informed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        active, reported = state["active"], state["reported"]
        self.active = None if active is None else Level[active]
        self.reported = None if reported is None else Level[reported]
        self.calm = int(state["calm"])
        since = state["since_report"]
        self.since_report = None if since is None else int(since)
        self.informed = bool(state["informed"])
