"""The one verdict of a run, shown on every page: healthy, look, lost, recovered, saved, ended."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..tags import ENERGY_GAP
from .rule import Alert, Level, Memory

__all__ = ["LostState", "Verdict", "VerdictTracker"]

# Rows of the past, those of the blow-up itself at its end, and rows in a row that are back.
_PAST, _LAG, _CALM = 64, 8, 10
# From how far on from 0 and from 1 an overlap P(f⁻ > f⁺) is one of energies that touch.
_EDGE = 0.15


@dataclass
class LostState(Memory):
    """The memory of whether a run is in a state that ERRORs reported, and has not left.

    It has left once every reported number is back inside its limit, and the energies are within
    their range before the first ERROR, on ten rows in a row, or touch, on 64: where an ERROR fell
    into the first rows, the range before it is that of an untrained network.
    """

    sizes: list[float] = field(default_factory=list)  # |gap| + spread of rows in no such state
    within: float = sys.float_info.max  # the size that the energies had before
    is_lost: bool = False
    # The tag and limit of every number that was reported, and whether that is an upper limit.
    limits: list[tuple[str, float, bool]] = field(default_factory=list)
    calm: int = 0  # rows in a row inside limits and range
    touching: int = 0  # rows in a row inside limits whose energies touch

    def update(self, row: Mapping[str, float], errors: Sequence[Alert]) -> None:
        """Take a row and its ERRORs."""
        size = abs(row.get(ENERGY_GAP, math.nan)) + row.get("f_pos/std", math.nan)
        if errors and not self.is_lost:
            past = self.sizes[: max(1, len(self.sizes) - _LAG)]
            self.is_lost, self.within = True, max(past, default=sys.float_info.max)
        for error in errors:
            if math.isfinite(error.limit):
                self.limits.append((error.tag, error.limit, error.value > error.limit))
        if self.is_lost and ENERGY_GAP in row:
            is_inside = not errors and not any(
                row.get(tag, limit) > limit if is_upper else row.get(tag, limit) < limit
                for tag, limit, is_upper in self.limits
            )
            touches = _EDGE <= row.get("energy_overlap", math.nan) <= 1 - _EDGE
            self.calm = self.calm + 1 if is_inside and size <= self.within else 0
            self.touching = self.touching + 1 if is_inside and touches else 0
            if self.calm == _CALM or self.touching == _PAST:
                self.leave()
        if not self.is_lost and math.isfinite(size):
            self.sizes = [*self.sizes[1 - _PAST :], size]

    def leave(self) -> None:
        """Note that the run has left the state."""
        self.is_lost, self.limits, self.calm, self.touching = False, [], 0, 0


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run so far.

    Attributes:
        name: "healthy"; "look", a WARN; "lost", an ERROR whose state has not been left;
            "recovered", one that was left without help; "saved", one that rollbacks took back;
            "ended", a lost run that the guard ended by an error, as action="raise" does.
        step: the step from which on it is to be looked at or lost, or has recovered or been saved.
        rule: the rule of the alert that it rests on, if any.
        rollbacks: the number of them so far.
    """

    name: Literal["healthy", "look", "lost", "recovered", "saved", "ended"]
    step: int = 0
    rule: str = ""
    rollbacks: int = 0

    def __str__(self) -> str:
        back = f"{self.rollbacks} rollback{'s' if self.rollbacks > 1 else ''}"
        if self.name == "healthy":
            return self.name
        if self.name == "saved":
            text = f"saved by {back}, the last to step {self.step:,}"
        else:
            how = {"recovered": "recovered at", "ended": "ended by an ERROR at"}
            text = f"{how.get(self.name, f'{self.name} since')} step {self.step:,}"
            text += f" after {back}" if self.rollbacks else ""
        return f"{text} ({self.rule})" if self.rule else text

    @property
    def is_lost(self) -> bool:
        """Return whether its numbers are those of a lost state, on which no advice can rest."""
        return self.name in ("lost", "ended")


@dataclass
class VerdictTracker(Memory):
    """Follow the number ``alert_level`` of the rows of a run, and know its verdict."""

    level: int = 0  # of the last row
    since: int = -1  # the step at which that began
    rule: str = ""  # whose alert came then
    left: int = -1  # the step at which an ERROR was left, the last one since any rollback
    left_rule: str = ""
    rollbacks: int = 0
    restored: int = 0  # the step to which the last one went back
    is_ended: bool = False  # by the guard, in the state that it is in

    def update(self, step: int, level: float, rule: str = "") -> bool:
        """Take the level of the row of a step that is over, and the rule of its worst alert.

        Return whether the verdict is another one.
        """
        is_new = int(level) != self.level or self.since < 0 or self.is_ended
        if is_new and self.level == Level.ERROR > level:
            self.left, self.left_rule = step, self.rule
        if int(level) != self.level or self.since < 0:
            self.level, self.since, self.rule = int(level), step, rule
        self.is_ended = False
        return is_new

    @property
    def lost_since(self) -> int | None:
        """The step at which the present ERROR began; None without one."""
        return self.since if self.level == Level.ERROR else None

    def rolled_back(self, count: int, step: int, rule: str) -> None:
        """Note that the count-th rollback took an ERROR back, to the state before a step."""
        self.__init__(rollbacks=count, restored=step, left_rule=rule)  # type: ignore[misc]

    @property
    def verdict(self) -> Verdict:
        """The verdict of the rows so far."""
        if self.level > Level.INFO:
            name: Any = "lost" if self.level == Level.ERROR else "look"
            name = "ended" if self.is_ended else name
            return Verdict(name, self.since, self.rule, self.rollbacks)
        if self.left >= 0:
            return Verdict("recovered", self.left, self.left_rule, self.rollbacks)
        if self.rollbacks:
            return Verdict("saved", self.restored, self.left_rule, self.rollbacks)
        return Verdict("healthy")
