"""What a rule says of one row; and the watchers of the rules that need no band."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .alert import Level
from .rules import Bound, FloorRule, MedianRule, NonFiniteRule
from .statistics import RollingWindow

__all__ = ["FloorWatcher", "MedianWatcher", "NonFiniteWatcher", "Reading", "Watcher"]

_NAN = math.nan


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rule says of one row.

    Attributes:
        level: None while nothing is wrong.
        calm: whether the statistics are inside the tighter band that ends an episode; None where
            the row does not tell.
        tag, value, limit, window, remedies: as in :class:`~ebmguard.Alert`; only meaningful with a
            level.
    """

    level: Level | None
    calm: bool | None
    tag: str = ""
    value: float = _NAN
    limit: float = _NAN
    window: int = 0
    remedies: tuple[str, str] = ("", "")


_CALM, _NOT_CALM, _UNKNOWN = Reading(None, True), Reading(None, False), Reading(None, None)


class Watcher(Protocol):
    """The memory of one rule."""

    def read(self, row: Mapping[str, float]) -> Reading:
        """Take one row."""

    def state_dict(self) -> dict[str, Any]:
        """The memory as JSON-able data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class NonFiniteWatcher:
    """Has no memory."""

    def __init__(self, rule: NonFiniteRule) -> None:
        self.rule = rule

    def read(self, row: Mapping[str, float]) -> Reading:
        """ERROR if any count is above 0 or any number that is owed is not finite."""
        rule, seen = self.rule, False
        for tag in rule.counts:
            value = row.get(tag)
            if value is not None:
                seen = True
                if not value <= 0:
                    return self._error(row, tag, value, 0.0)
        for tag in rule.numbers:
            value = row.get(tag)
            if value is not None:
                seen = True
                if not math.isfinite(value):
                    return self._error(row, tag, value, math.inf)
        for tag in rule.bounded:
            value = row.get(tag)
            if value is not None and math.isinf(value):
                return self._error(row, tag, value, math.inf)
        return _CALM if seen else _UNKNOWN

    def _error(self, row: Mapping[str, float], tag: str, value: float, limit: float) -> Reading:
        remedies = self.rule.remedies.at(row.get("beta_star", _NAN))
        return Reading(Level.ERROR, False, tag, value, limit, 0, remedies)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


class FloorWatcher:
    """Counts the steps that GradScale has been under its floor."""

    def __init__(self, rule: FloorRule) -> None:
        self.rule = rule
        self.source = ""
        self.count = 0

    def read(self, row: Mapping[str, float]) -> Reading:
        """WARN after the short patience, ERROR after the long one."""
        rule = self.rule
        beta_star = row.get("beta_star", _NAN)
        tag = rule.reference_tag if beta_star == 0 else rule.tag
        value = row.get(tag, _NAN)
        if math.isnan(value):
            return _UNKNOWN
        if tag != self.source:
            # beta* moved to or from 0: the count so far was of another quantity.
            self.source, self.count = tag, 0
        if value > rule.clear:
            self.count = 0
            return _CALM
        if value >= rule.floor:
            return _NOT_CALM
        self.count += 1
        if self.count < rule.warn_patience:
            return _NOT_CALM
        lost = self.count >= rule.error_patience and beta_star != 0
        level = Level.ERROR if lost else Level.WARN
        remedies = rule.remedies.at(beta_star)
        return Reading(level, False, tag, value, rule.floor, self.count, remedies)

    def state_dict(self) -> dict[str, Any]:
        """The count and what it counts."""
        return {"source": self.source, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.source, self.count = str(state["source"]), int(state["count"])


class MedianWatcher:
    """A rolling median for each bound."""

    def __init__(self, rule: MedianRule) -> None:
        self.rule = rule
        self.prefix = ""
        self._start()

    def _start(self) -> None:
        self.windows = [RollingWindow(bound.window) for bound in self.rule.bounds]

    def read(self, row: Mapping[str, float]) -> Reading:
        """A level while a full window's median is out of bounds."""
        beta_star = row.get("beta_star", _NAN)
        prefix = self.rule.reference_prefix if beta_star == 0 else ""
        if not any(prefix + bound.tag in row for bound in self.rule.bounds):
            return _UNKNOWN  # such as the row of a step without a loss
        if prefix != self.prefix:
            self.prefix = prefix
            self._start()
        broken: list[tuple[Bound, float]] = []
        known, calm = False, True
        for bound, window in zip(self.rule.bounds, self.windows, strict=True):
            value = row.get(prefix + bound.tag, _NAN)
            if math.isfinite(value):
                window.push(value)
            if len(window) < window.size:
                continue
            known = True
            median = window.median()
            sign = 1.0 if bound.side == "above" else -1.0
            calm &= sign * median <= sign * bound.clear
            if sign * median > sign * bound.limit:
                broken.append((bound, median))
        if not known:
            return _UNKNOWN
        if not broken:
            return _CALM if calm else _NOT_CALM
        bound, median = max(broken, key=lambda each: each[0].level)
        tag, remedies = prefix + bound.tag, bound.remedies.at(beta_star)
        return Reading(bound.level, False, tag, median, bound.limit, bound.window, remedies)

    def state_dict(self) -> dict[str, Any]:
        """The windows, oldest value first, in the order of the bounds."""
        return {"prefix": self.prefix, "windows": [window.values() for window in self.windows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.prefix = str(state["prefix"])
        pairs = zip(self.rule.bounds, state["windows"], strict=True)
        self.windows = [RollingWindow(bound.window, values) for bound, values in pairs]
