"""``sampler_failing``: GradScale stays under its floor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, DivergenceError, SamplerFailingError, Stateful, typed
from .alert import Level
from .remedies import SAMPLER, Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Limits, Reading

__all__ = ["FloorRule"]


@typed
@dataclass(frozen=True)
class FloorRule:
    """WARN, then ERROR, while GradScale stays under its floor.

    Steps between ``floor`` and ``clear`` neither count nor reset the count. ERROR is for beta*
    other than 0 only: there GradScale multiplies the gradient, and an adaptive optimiser amplifies
    what little is left of it (App. H). At beta* = 0 the reference exponent is read instead.

    Attributes:
        tag, reference_tag: the diagnostic, and what is read instead at beta* = 0.
        floor, clear: under the first it fails, above the second it is calm.
        warn_patience, error_patience: steps under the floor before WARN and before ERROR.
        name, calm_steps, cooldown, error: see :class:`~ebmguard.alerts.Rule`.
    """

    name: str = "sampler_failing"
    tag: str = "grad_scale"
    reference_tag: str = "ref/grad_scale"
    floor: float = 0.1
    clear: float = 0.2
    warn_patience: int = 20
    error_patience: int = 200
    calm_steps: int = 10
    cooldown: int = 500
    remedies: Remedies = SAMPLER
    error: type[DivergenceError] = SamplerFailingError

    def __post_init__(self) -> None:
        if not (self.floor <= self.clear and 1 <= self.warn_patience <= self.error_patience):
            raise ConfigError(
                f"Rule {self.name!r}: expected floor <= clear and 1 <= warn_patience <= "
                f"error_patience, but got floor={self.floor}, clear={self.clear}, "
                f"warn_patience={self.warn_patience}, error_patience={self.error_patience}."
            )

    def limits(self) -> dict[str, Limits]:
        """The floor; what makes an ERROR is its patience."""
        return {self.tag: Limits(low=self.floor)}

    def watcher(self) -> _FloorWatcher:
        """A new watcher."""
        return _FloorWatcher(self)


class _FloorWatcher(Stateful):
    def __init__(self, rule: FloorRule) -> None:
        self.rule = rule
        self.source = ""
        self.count = 0

    def read(self, row: Mapping[str, float]) -> Reading:
        rule = self.rule
        beta_star = row.get("beta_star", math.nan)
        tag = rule.reference_tag if beta_star == 0 else rule.tag
        value = row.get(tag, math.nan)
        if math.isnan(value):
            return UNKNOWN
        if tag != self.source or value > rule.clear:
            # Healthy; or beta* moved to or from 0, and the count so far was of another quantity.
            self.source, self.count = tag, 0
        self.count += value < rule.floor
        if value >= rule.floor or self.count < rule.warn_patience:
            return CALM if value > rule.clear else NOT_CALM
        is_lost = self.count >= rule.error_patience and beta_star != 0
        level, remedies = Level.ERROR if is_lost else Level.WARN, rule.remedies.at(beta_star)
        return Reading(level, False, tag, value, rule.floor, self.count, remedies)

    def after_rollback(self) -> None:
        self.count = 0

    def _saved(self) -> dict[str, Any]:
        return {"source": str, "count": int}
