"""Rules on the median of a slow diagnostic: weights, overlap, chains, clamp, step size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError, DivergenceError, Stateful, typed
from .alert import Level
from .remedies import Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Limits, Reading
from .statistics import RollingWindow

__all__ = ["Bound", "MedianRule"]


@typed
@dataclass(frozen=True)
class Bound:
    """A limit that the median of one diagnostic over a window should keep to.

    Single values of slow diagnostics are noise at ordinary batch sizes.

    Attributes:
        side: on which side of the limit the median is out of range.
        limit: exclusive.
        clear: where the median is calm again, on the other side of the limit.
        window: values in the median; there is none before so many have come.
        level: what is reported: INFO or WARN.
    """

    tag: str
    side: Literal["above", "below"]
    limit: float
    clear: float
    window: int
    remedies: Remedies
    level: Level = Level.WARN

    def __post_init__(self) -> None:
        if self.beyond(self.limit, self.clear) or self.window < 1 or self.level is Level.ERROR:
            raise ConfigError(
                f"Bound of {self.tag!r}: expected clear on the other side of the limit than "
                f"{self.side!r}, window >= 1 and level INFO or WARN, but got limit={self.limit}, "
                f"clear={self.clear}, window={self.window}, level={self.level.name}."
            )

    def beyond(self, limit: float, value: float) -> bool:
        """Whether a value lies on the wrong side of a limit."""
        return value > limit if self.side == "above" else value < limit


@typed
@dataclass(frozen=True)
class MedianRule:
    """WARN or INFO while a median over a window is out of bounds.

    Attributes:
        bounds: where several are broken, the first of the highest level speaks.
        reference_prefix: put before the tags at beta* = 0, where the weights say nothing: what they
            would be at the reference exponent is read instead.
        name, calm_steps, cooldown, error: see :class:`~ebmguard.alerts.Rule`.
    """

    name: str
    bounds: tuple[Bound, ...]
    reference_prefix: str = ""
    calm_steps: int = 10
    cooldown: int = 500
    error: type[DivergenceError] = DivergenceError

    def limits(self) -> dict[str, Limits]:
        """The bounds that warn."""
        found: dict[str, Limits] = {}
        for bound in self.bounds:
            if bound.level is Level.WARN:
                above = bound.side == "above"
                own = Limits(high=bound.limit) if above else Limits(low=bound.limit)
                found[bound.tag] = own.within(found.get(bound.tag, own))
        return found

    def watcher(self) -> _MedianWatcher:
        """A new watcher."""
        return _MedianWatcher(self)


class _MedianWatcher(Stateful):
    def __init__(self, rule: MedianRule) -> None:
        self.rule = rule
        self.prefix = ""
        self.windows = [RollingWindow(bound.window) for bound in rule.bounds]

    def read(self, row: Mapping[str, float]) -> Reading:
        bounds, beta_star = self.rule.bounds, row.get("beta_star", math.nan)
        prefix = self.rule.reference_prefix if beta_star == 0 else ""
        if not any(prefix + bound.tag in row for bound in bounds):
            return UNKNOWN  # such as the row of a step without a loss
        if prefix != self.prefix:
            self.prefix = prefix
            self.windows = [RollingWindow(bound.window) for bound in bounds]
        medians = []
        for bound, window in zip(bounds, self.windows, strict=True):
            if math.isfinite(value := row.get(prefix + bound.tag, math.nan)):
                window.push(value)
            if len(window) == bound.window:
                medians.append((bound, window.median()))
        if not medians:
            return UNKNOWN
        broken = [(bound, median) for bound, median in medians if bound.beyond(bound.limit, median)]
        if not broken:
            is_calm = not any(bound.beyond(bound.clear, median) for bound, median in medians)
            return CALM if is_calm else NOT_CALM
        bound, median = max(broken, key=lambda each: each[0].level)
        tag, remedies = prefix + bound.tag, bound.remedies.at(beta_star)
        return Reading(bound.level, False, tag, median, bound.limit, bound.window, remedies)

    def _saved(self) -> dict[str, Any]:
        return {"prefix": str, "windows": self._filled}

    def _filled(self, saved: Sequence[Sequence[float]]) -> list[RollingWindow]:
        pairs = zip(self.rule.bounds, saved, strict=True)
        return [RollingWindow(bound.window, values) for bound, values in pairs]
