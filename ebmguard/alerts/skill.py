"""The rule of ``guard(skill=)``: a number that the trainer logs, such as an accuracy, was lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .judge import Judge
from .remedies import LOST
from .rule import CALM, UNKNOWN, Alert, Level, Memory, Reading

__all__ = ["Skill"]

# Values whose median counts: a tenth of those so far, since one a step is noisier than one an epoch
# and comes more often.
_LEAST, _MOST, _TENTH = 5, 50, 10
_KEPT = 0.8  # of the best median


class Skill:
    """A judge of one number apart: no rollback may rest on what one rank alone logs.

    Attributes:
        is_known: whether it was logged; True where there is none.
    """

    def __init__(self, tag: str | None) -> None:
        self.is_known = tag is None
        self._tag = tag or ""
        self._judge = Judge([_SkillRule(tag)] if tag else [])

    @property
    def level(self) -> Level:
        """The level: WARN while the number is low, else INFO."""
        return self._judge.level if self._tag else Level.INFO

    def observe(self, step: int, logged: Mapping[str, float]) -> list[Alert]:
        """Take what was logged in a step that is over."""
        if self._tag not in logged:
            return []
        self.is_known = True
        return self._judge.observe(step, logged)

    def state_dict(self) -> dict[str, Any]:
        """The memory, under the name of the number."""
        return {self._tag: self._judge.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; what was remembered of another number is left out."""
        if self._tag in state:
            self._judge.load_state_dict(state[self._tag])


@dataclass(frozen=True)
class _SkillRule:
    """Report a WARN while the median of the latest values is under 0.8 of the best such median.

    A ratio is the same for shares and for percent. A number that was never above 0 is left alone.
    """

    tag: str  # of which higher is better

    @property
    def name(self) -> str:
        """The name of the rule and the number, for the verdict."""
        return f"skill {self.tag}"

    def watcher(self) -> _SkillWatcher:
        """A new watcher."""
        return _SkillWatcher(self)


@dataclass
class _SkillWatcher(Memory):
    rule: _SkillRule
    count: int = 0
    values: list[float] = field(default_factory=list)
    best: float = 0.0

    def read(self, row: Mapping[str, float]) -> Reading:
        value = row.get(self.rule.tag, math.nan)
        if not math.isfinite(value):
            return UNKNOWN
        self.count += 1
        window = min(_MOST, max(_LEAST, self.count // _TENTH))
        self.values = [*self.values[1 - window :], value]
        if len(self.values) < _LEAST:
            return UNKNOWN
        now = median(self.values)
        self.best = max(self.best, now)
        limit = _KEPT * self.best
        if now >= limit or not self.best:
            return CALM
        return Reading(
            Level.WARN, False, self.rule.tag, now, limit, len(self.values), LOST.positive
        )
