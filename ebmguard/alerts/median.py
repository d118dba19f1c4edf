"""Rules on the median of a slow diagnostic: weights, overlap, chains, clamp, step size.

A median, because a mean is dragged along by the very outliers that it should reveal.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError, DivergenceError, Stateful, typed
from .alert import Level
from .remedies import Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Limits, Reading

__all__ = ["Bound", "MedianRule", "RollingWindow"]


class RollingWindow:
    """The last ``size`` finite values of a series, kept both in order of time and sorted.

    One NaN in a sorted list would break every later search in silence: non-finite ones are refused.
    """

    def __init__(self, size: int, values: Sequence[float] = ()) -> None:
        if size < 1:
            raise ConfigError(f"A window holds at least one value, but size is {size}.")
        self._size = size
        self._values = list(map(float, values[-size:]))
        self._sorted = sorted(self._values)
        if not all(map(math.isfinite, self._values)):
            raise ConfigError(f"A window takes finite values, but got {self._values}.")

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_full(self) -> bool:
        """Whether the next value makes the oldest one leave."""
        return len(self._values) == self._size

    def push(self, value: float) -> None:
        """Add a value; the oldest one leaves a full window.

        Raises:
            ConfigError: if the value is not finite.
        """
        if not math.isfinite(value):
            raise ConfigError(f"A window takes finite values, but got {value}.")
        values, ordered = self._values, self._sorted
        if len(values) == self._size:
            del ordered[bisect_left(ordered, values.pop(0))]
        values.append(value)
        insort(ordered, value)

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)  # oldest first

    def median(self) -> float:
        """Median of the window, NaN if it is empty."""
        ordered, half = self._sorted, len(self._sorted) // 2
        if len(ordered) % 2:
            return ordered[half]
        # Halves first: the sum of two large floats may overflow.
        return ordered[half - 1] / 2 + ordered[half] / 2 if ordered else math.nan


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
        values = [row.get(prefix + bound.tag) for bound in bounds]
        if values.count(None) == len(values):
            return UNKNOWN  # such as the row of a step without a loss
        if prefix != self.prefix:
            self.prefix = prefix
            self.windows = [RollingWindow(bound.window) for bound in bounds]
        reading, broken = UNKNOWN, None
        for bound, window, value in zip(bounds, self.windows, values, strict=True):
            if value is not None and math.isfinite(value):
                window.push(value)
            if not window.is_full:
                continue
            median = window.median()
            if not bound.beyond(bound.clear, median):
                reading = CALM if reading is UNKNOWN else reading
                continue
            reading = NOT_CALM
            if bound.beyond(bound.limit, median) and (not broken or bound.level > broken[0].level):
                broken = bound, median
        if broken is None:
            return reading
        bound, median = broken
        tag, remedies = prefix + bound.tag, bound.remedies.at(beta_star)
        return Reading(bound.level, False, tag, median, bound.limit, bound.window, remedies)

    def _saved(self) -> dict[str, Any]:
        return {"prefix": str, "windows": self._filled}

    def _filled(self, saved: Sequence[Sequence[float]]) -> list[RollingWindow]:
        pairs = zip(self.rule.bounds, saved, strict=True)
        return [RollingWindow(bound.window, values) for bound, values in pairs]
