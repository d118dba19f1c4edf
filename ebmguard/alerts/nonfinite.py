"""``nonfinite``: a NaN or an infinity is an ERROR at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DivergenceError, NonFiniteError
from .alert import Level
from .remedies import NONFINITE, Remedies
from .rule import CALM, UNKNOWN, Limits, Reading

__all__ = ["NonFiniteRule"]


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
    counts: tuple[str, ...] = (
        "nonfinite/energies",
        "nonfinite/samples",
        "nonfinite/pos",
        "nonfinite/neg",
        "nonfinite/gradients",
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

    def watcher(self) -> NonFiniteWatcher:
        """A new watcher."""
        return NonFiniteWatcher(self)


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
        return CALM if seen else UNKNOWN

    def _error(self, row: Mapping[str, float], tag: str, value: float, limit: float) -> Reading:
        remedies = self.rule.remedies.at(row.get("beta_star", math.nan))
        return Reading(Level.ERROR, False, tag, value, limit, 0, remedies)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
