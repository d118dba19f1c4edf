"""A run that has failed: ``nonfinite``, at once; ``collapsed``, the network became a constant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CollapsedError, DivergenceError, NonFiniteError, typed
from ..tags import ENERGY_GAP
from .alert import Level
from .remedies import COLLAPSED, NONFINITE, Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Limits, Memory, Reading, check_settings

__all__ = ["CollapsedRule", "NonFiniteRule"]


@typed
@dataclass(frozen=True)
class NonFiniteRule:
    """ERROR at once when anything is not finite.

    Attributes:
        counts: must be 0; NaN is as bad as more than 0.
        numbers: owe a finite number whenever they are in the row.
        bounded: NaN means unknown, but an infinity is an alarm.
        name, calm_steps, cooldown, error: see :class:`~ebmguard.alerts.Rule`.
    """

    name: str = "nonfinite"
    counts: tuple[str, ...] = tuple(
        f"nonfinite/{what}" for what in ("energies", "samples", "pos", "neg", "gradients")
    )
    numbers: tuple[str, ...] = ("energy_gap", "f_pos/median", "f_neg/median")
    bounded: tuple[str, ...] = ("sampler/grad_norm", "sampler/grad_norm_max")
    calm_steps: int = 20
    cooldown: int = 0
    remedies: Remedies = NONFINITE
    error: type[DivergenceError] = NonFiniteError

    @property
    def owed(self) -> tuple[str, ...]:
        """Where NaN is an alarm."""
        return self.counts + self.numbers

    def limits(self) -> dict[str, Limits]:
        """Counts must be 0."""
        return {tag: Limits(high=0, error_high=0) for tag in self.counts}

    def watcher(self) -> _NonFiniteWatcher:
        """A new watcher."""
        return _NonFiniteWatcher(self)


class _NonFiniteWatcher(Memory):
    def __init__(self, rule: NonFiniteRule) -> None:
        self.rule = rule
        self.owed = {*rule.owed}
        self.highest = dict.fromkeys(rule.counts, 0.0)
        self.highest |= dict.fromkeys(rule.numbers + rule.bounded, math.inf)

    def read(self, row: Mapping[str, float]) -> Reading:
        reading = UNKNOWN
        for tag, limit in self.highest.items():
            value = row.get(tag)
            if value is None:
                continue
            is_owed = tag in self.owed
            if value > limit or math.isinf(value) or (is_owed and math.isnan(value)):
                remedies = self.rule.remedies.at(row.get("beta_star", math.nan))
                return Reading(Level.ERROR, False, tag, value, limit, 0, remedies)
            if is_owed:
                reading = CALM
        return reading

    def _saved(self) -> dict[str, Any]:
        return {}


@typed
@dataclass(frozen=True)
class CollapsedRule:
    """ERROR when f no longer tells one sample from another, as where all of its units are dead.

    Both spreads and the gap are then rounding errors of f. One that never told samples apart, such
    as a head that starts at 0, is left alone.

    Attributes:
        resolution: of f, as a share of |f_pos/median|.
        patience: steps within it in a row before the ERROR.
        name, calm_steps, cooldown, error: see :class:`~ebmguard.alerts.Rule`.
    """

    name: str = "collapsed"
    resolution: float = 1e-6
    patience: int = 20
    calm_steps: int = 10
    cooldown: int = 0
    remedies: Remedies = COLLAPSED
    error: type[DivergenceError] = CollapsedError

    def __post_init__(self) -> None:
        is_meant = 0 <= self.resolution < 1 and self.patience >= 1
        check_settings(self, (is_meant, "0 <= resolution < 1 and patience >= 1"))

    def watcher(self) -> _CollapsedWatcher:
        """A new watcher."""
        return _CollapsedWatcher(self)


class _CollapsedWatcher(Memory):
    def __init__(self, rule: CollapsedRule) -> None:
        self.rule = rule
        self.told_apart = False
        self.count = 0

    def read(self, row: Mapping[str, float]) -> Reading:
        rule = self.rule
        gap, spread = row.get(ENERGY_GAP, math.nan), row.get("f_pos/std", math.nan)
        if math.isnan(gap) or math.isnan(spread):
            return UNKNOWN
        limit = rule.resolution * abs(row.get("f_pos/median", 0.0))
        is_constant = max(abs(gap), spread, row.get("f_neg/std", 0.0)) <= limit
        self.count = self.count + 1 if is_constant and self.told_apart else 0
        self.told_apart |= not is_constant
        if self.count < rule.patience:
            return NOT_CALM if self.count else CALM
        remedies = rule.remedies.at(row.get("beta_star", math.nan))
        return Reading(Level.ERROR, False, "f_pos/std", spread, limit, self.count, remedies)

    def after_rollback(self) -> None:
        self.count = 0

    def _saved(self) -> dict[str, Any]:
        return {"told_apart": bool, "count": int}
