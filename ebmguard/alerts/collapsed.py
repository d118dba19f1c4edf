"""``collapsed``: the network has become a constant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CollapsedError, ConfigError, DivergenceError, Stateful, typed
from ..tags import ENERGY_GAP
from .alert import Level
from .remedies import COLLAPSED, Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Reading

__all__ = ["CollapsedRule"]


@typed
@dataclass(frozen=True)
class CollapsedRule:
    """ERROR when f no longer tells one sample from another, as where all of its units are dead.

    Both spreads and the gap are then rounding errors of f itself. Such a network has no gradient
    to get out of it. One that never told samples apart, such as a head that starts at 0, is left
    alone.

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
        if not (0 <= self.resolution < 1 and self.patience >= 1):
            raise ConfigError(
                f"Rule {self.name!r}: expected 0 <= resolution < 1 and patience >= 1, but got "
                f"resolution={self.resolution}, patience={self.patience}."
            )

    def watcher(self) -> _CollapsedWatcher:
        """A new watcher."""
        return _CollapsedWatcher(self)


class _CollapsedWatcher(Stateful):
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
        """The run is no longer where it was counted."""
        self.count = 0

    def _saved(self) -> dict[str, Any]:
        return {"told_apart": bool, "count": int}
