"""What the rules say of single values: the limits of every diagnostic, for reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .alert import Level
from .defaults import DEFAULT_RULES
from .rule import Limits, Rule

__all__ = ["Bands"]


class Bands:
    """The limits of every diagnostic, step by step, as the rules have them.

    Where several rules have limits of one diagnostic, the narrowest hold. ``limits`` has them by
    tag, as they held for the last row.
    """

    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES) -> None:
        watchers: list[Any] = [rule.watcher() for rule in rules]
        self._moving = [watcher for watcher in watchers if hasattr(watcher, "limits")]
        self._owed: set[str] = set()
        self._fixed: dict[str, Limits] = {}
        for rule in rules:
            self._owed.update(getattr(rule, "owed", ()))
            if hasattr(rule, "limits"):
                self._fixed |= _narrowed(rule.limits(), self._fixed)
        self.limits = dict(self._fixed)

    def owes(self, tag: str) -> bool:
        """Whether NaN is an alarm, and not just unknown."""
        return tag in self._owed

    def level(self, tag: str, value: float) -> Level | None:
        """What a value of now is worth by itself, without the rules' patience."""
        limits = self.limits.get(tag)
        if math.isnan(value):
            return Level.ERROR if self.owes(tag) else None
        if limits is None or limits.low <= value <= limits.high:
            return None
        inside = limits.error_low <= value <= limits.error_high
        return Level.WARN if inside and math.isfinite(value) else Level.ERROR

    def read(self, row: Mapping[str, float]) -> dict[str, Limits]:
        """Take the row of one step; return the limits that move, as they were for this row."""
        moving: dict[str, Limits] = {}
        for watcher in self._moving:
            watcher.read(row)
            moving |= _narrowed(watcher.limits(), self._fixed | moving)
        self.limits |= moving
        return moving


def _narrowed(limits: Mapping[str, Limits], others: Mapping[str, Limits]) -> dict[str, Limits]:
    return {tag: own.within(others.get(tag, own)) for tag, own in limits.items()}
