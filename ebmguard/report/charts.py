"""Which diagnostics are drawn, on which scale, and what the alert rules say of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..alerts import (
    DEFAULT_RULES,
    BandRule,
    FloorRule,
    Level,
    MedianRule,
    NonFiniteRule,
    Rule,
)
from ..alerts.band import BandWatcher
from ..tags import REFERENCE, TAGS, Scale

__all__ = ["ACCURACY", "CHARTS", "MORE_CHARTS", "Bands", "Chart", "Limits", "value_of"]

_INF = math.inf


@dataclass(frozen=True)
class Chart:
    """One diagnostic as a person reads it.

    Attributes:
        tag: the diagnostic, without the ``guard/`` prefix.
        title: its name.
        scale: as of :class:`ebmguard.tags.Tag`.
        note: what is healthy and what else it tells, in a few words.
    """

    tag: str
    title: str
    scale: Scale
    note: str


ACCURACY = Chart("accuracy", "test accuracy", "share", "of the evaluations")
_ALL = {
    tag.name: Chart(
        tag.name,
        tag.title,
        tag.scale,
        "; ".join(filter(None, (tag.healthy, tag.tells))) or tag.definition,
    )
    for tag in TAGS.values()
    if tag.scale is not None
}
CHARTS = tuple(
    _ALL.pop(tag)
    for tag in ("energy_gap", "grad_scale", "ess", "energy_overlap", "sampler/grad_norm")
)
MORE_CHARTS = tuple(_ALL.values())


def value_of(row: Mapping[str, float], tag: str) -> float | None:
    """A diagnostic of a row, None where the row lacks it.

    At β* = 0 the weights are uniform and say nothing; as the alert rules do, it is then read at the
    reference exponent.
    """
    if row.get("beta_star") == 0 and REFERENCE + tag in row:
        tag = REFERENCE + tag
    return row.get(tag)


class Limits(NamedTuple):
    """The range in which no rule says WARN, and the wider one in which none says ERROR."""

    low: float = -_INF
    high: float = _INF
    error_low: float = -_INF
    error_high: float = _INF


class Bands:
    """The limits of every diagnostic, step by step, as the detector has them.

    Fixed limits are the rules' own. A band around the run's own past is found as the detector
    finds it, from the same rows.

    Args:
        rules: the detector's.
    """

    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES) -> None:
        self.limits: dict[str, Limits] = {}
        self._watchers = []
        self._owed: set[str] = set()
        for rule in rules:
            if isinstance(rule, BandRule):
                self._watchers.append(BandWatcher(rule))
            elif isinstance(rule, FloorRule):
                self.limits[rule.tag] = Limits(low=rule.floor)
            elif isinstance(rule, MedianRule):
                for bound in rule.bounds:
                    if bound.level is Level.WARN:
                        side = "high" if bound.side == "above" else "low"
                        limits = self.limits.get(bound.tag, Limits())
                        self.limits[bound.tag] = limits._replace(**{side: bound.limit})
            elif isinstance(rule, NonFiniteRule):
                self.limits |= {tag: Limits(high=0, error_high=0) for tag in rule.counts}
                self._owed.update(rule.counts, rule.numbers)

    def owes(self, tag: str) -> bool:
        """Whether NaN is an alarm, and not just unknown."""
        return tag in self._owed

    def level(self, tag: str, value: float) -> Level | None:
        """What a value of now is worth by itself, without the rules' patience.

        NaN is worth nothing, but where a finite number is owed.
        """
        limits = self.limits.get(tag)
        if math.isnan(value):
            return Level.ERROR if self.owes(tag) else None
        if limits is None or limits.low <= value <= limits.high:
            return None
        inside = limits.error_low <= value <= limits.error_high
        return Level.WARN if inside and math.isfinite(value) else Level.ERROR

    def read(self, row: Mapping[str, float]) -> dict[str, Limits]:
        """Take the row of one step; return the limits that move, as they were for this row."""
        moving = {}
        for watcher in self._watchers:
            watcher.read(row)
            for track in watcher.tracks:
                series, cap = track.series, track.series.cap * (watcher.unit or 1.0)
                if math.isnan(track.centre):
                    limits = Limits(error_low=-cap, error_high=cap)
                else:
                    down, up = series.side != "up", series.side != "down"
                    limits = Limits(
                        track.limit(series.warn, -_INF) if down else -_INF,
                        track.limit(series.warn, _INF) if up else _INF,
                        max(-cap, track.limit(series.error, -_INF)) if down else -cap,
                        min(cap, track.limit(series.error, _INF)) if up else cap,
                    )
                moving[series.tag] = limits
        self.limits |= moving
        return moving
