"""``nonfinite``: a NaN or an infinity is an ERROR at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DivergenceError, NonFiniteError, Stateful, typed
from .alert import Level
from .remedies import NONFINITE, Remedies
from .rule import CALM, UNKNOWN, Limits, Reading

__all__ = ["NonFiniteRule"]


@typed
@dataclass(frozen=True)
class NonFiniteRule:
    """ERROR at once when anything is not finite.

    Attributes:
        counts: fractions or counts that must be 0; NaN is as bad as more than 0.
        numbers: diagnostics that owe a finite number whenever they are in the row.
        bounded: diagnostics where NaN means unknown, but an infinity is an alarm.
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


class _NonFiniteWatcher(Stateful):
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
