"""The rules that are shipped, measured in ``docs/alerts.md``; and the limits that rules set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import WeightsDegenerateError
from .growth import GrowthRule
from .remedies import CROWDED, HUNG, OLD, OVERSHOOT, SATURATED, TOO_LONG, TOO_SHORT, WEIGHTS
from .rule import Level, Limits, Rule
from .thresholds import Bound, CollapsedRule, FloorRule, MedianRule, NonFiniteRule

__all__ = ["DEFAULT_RULES", "Bands"]

_INFO = Level.INFO

# A bound: tag, side, limit, where it is calm again, values in the median, what helps, level.
DEFAULT_RULES: tuple[NonFiniteRule | GrowthRule | CollapsedRule | FloorRule | MedianRule, ...] = (
    NonFiniteRule(),
    GrowthRule(),
    CollapsedRule(),
    FloorRule(),
    MedianRule(
        "weights_degenerate",
        (
            Bound("ess", "below", 0.1, 0.15, 50, WEIGHTS),
            # The Pareto shape comes rarely, and each value pools the weights of several steps.
            Bound("pareto_k", "above", 0.7, 0.6, 5, WEIGHTS),
        ),
        reference_prefix="ref/",
        error=WeightsDegenerateError,
    ),
    MedianRule("overshoot", (Bound("energy_overlap", "above", 0.95, 0.9, 50, OVERSHOOT),)),
    MedianRule(
        "stale_chains",
        (
            # A chain that moves never repeats itself to the last bit.
            Bound("sampler/repeated", "above", 0.5, 0.1, 5, HUNG),
            Bound("buffer/duplicates", "above", 0.5, 0.4, 50, CROWDED),
            # Persistent chains that never start afresh are a method too: said, but not warned of.
            Bound("buffer/age", "above", 200.0, 150.0, 50, OLD, _INFO),
        ),
    ),
    # Of real images up to 0.82 of the entries lie at an end (MNIST).
    MedianRule("saturated", (Bound("sampler/clamped", "above", 0.95, 0.9, 50, SATURATED),)),
    # Trainers choose step and noise apart, and live with what is no exact sampler: INFO only.
    MedianRule(
        "step_size",
        (
            Bound("sampler/acceptance", "below", 0.01, 0.05, 5, TOO_LONG, _INFO),
            Bound("sampler/drift_to_noise", "above", 100.0, 50.0, 50, TOO_LONG, _INFO),
            Bound("sampler/drift_to_noise", "below", 0.001, 0.002, 50, TOO_SHORT, _INFO),
        ),
    ),
)


class Bands:
    """The limits of every diagnostic, the narrowest of all rules: ``limits`` of the last row."""

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
        """Whether NaN is an alarm."""
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
