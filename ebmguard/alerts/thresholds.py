"""The rules with fixed thresholds, for what fails at once, for GradScale and for medians."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from ..errors import (
    CollapsedError,
    ConfigError,
    DivergenceError,
    NonFiniteError,
    SamplerFailingError,
    typed,
)
from ..tags import BETA_STAR, ENERGY_GAP
from .remedies import CONSTANT, LOST, SAMPLER, Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Level, Limits, Memory, Reading, check_settings

__all__ = ["Bound", "CollapsedRule", "FloorRule", "MedianRule", "NonFiniteRule"]


@typed
@dataclass(frozen=True)
class NonFiniteRule:
    """Report an ERROR at once when anything is not finite.

    Attributes:
        counts: the tags that must be 0; NaN is as bad as more than 0.
        numbers: the tags that owe a finite number whenever they are in the row.
        bounded: the tags whose NaN means unknown, but an infinity is an alarm.
    """

    name: str = "nonfinite"
    counts: tuple[str, ...] = tuple(
        f"nonfinite/{what}" for what in ("energies", "samples", "pos", "neg", "gradients")
    )
    numbers: tuple[str, ...] = ("energy_gap", "f_pos/median", "f_neg/median")
    bounded: tuple[str, ...] = ("sampler/grad_norm", "sampler/grad_norm_max")
    remedies: Remedies = LOST
    error: type[DivergenceError] = NonFiniteError

    @property
    def owed(self) -> tuple[str, ...]:
        """The tags where NaN is an alarm."""
        return self.counts + self.numbers

    def limits(self) -> dict[str, Limits]:
        """The limits of the counts, which must be 0."""
        return {tag: Limits(high=0, error_high=0) for tag in self.counts}

    def watcher(self) -> _NonFiniteWatcher:
        """A new watcher."""
        return _NonFiniteWatcher(self)


@dataclass
class _NonFiniteWatcher(Memory):
    rule: NonFiniteRule

    def __post_init__(self) -> None:
        self.owed = {*self.rule.owed}
        self.highest = dict.fromkeys(self.rule.counts, 0.0)
        self.highest |= dict.fromkeys(self.rule.numbers + self.rule.bounded, math.inf)

    def read(self, row: Mapping[str, float]) -> Reading:
        for tag, limit in self.highest.items():
            value = row.get(tag, 0.0)
            if value > limit or math.isinf(value) or (math.isnan(value) and tag in self.owed):
                remedies = self.rule.remedies.at(row.get(BETA_STAR, math.nan))
                return Reading(Level.ERROR, False, tag, value, limit, 0, remedies)
        return UNKNOWN if self.owed.isdisjoint(row) else CALM

    def calm(self) -> tuple[float, float] | None:
        return _ANY if _FINITE.issuperset(self.highest) else None


_ROUNDING = 1e-6  # of a value of f in float32, as a share
_ANY = -math.inf, math.inf
_FINITE = {*NonFiniteRule().owed, *NonFiniteRule().bounded}  # where energies and gradients are


@typed
@dataclass(frozen=True)
class CollapsedRule:
    """Report an ERROR when f is the same for all samples, as where all of its units are dead.

    The larger of |gap| and ``f_pos/std`` was then, on 3/4 of the last ``rows``, at most a ``share``
    of what it had been, or rounding errors of f. What it had been is its largest median of so many
    rows. An f that never separated samples, such as a head that starts at 0, is left alone.
    """

    name: str = "collapsed"
    share: float = 0.003
    rows: int = 40
    remedies: Remedies = CONSTANT
    error: type[DivergenceError] = CollapsedError

    def __post_init__(self) -> None:
        check_settings(self, {"0 <= share < 1, rows >= 1": 0 <= self.share < 1 <= self.rows})

    def watcher(self) -> _CollapsedWatcher:
        """A new watcher."""
        return _CollapsedWatcher(self)


@dataclass
class _CollapsedWatcher(Memory):
    rule: CollapsedRule
    sizes: list[float] = field(default_factory=list)
    best: float = 0.0
    told_apart: bool = False

    limit = 0.0  # of the row read last

    def calm(self) -> tuple[float, float]:
        return 8 * self.limit, math.inf  # the larger of two numbers is half of their sum at least

    def read(self, row: Mapping[str, float]) -> Reading:
        rule = self.rule
        gap, spread = row.get(ENERGY_GAP, math.nan), row.get("f_pos/std", math.nan)
        if math.isnan(gap) or math.isnan(spread):
            return UNKNOWN
        size, rounding = max(abs(gap), spread), _ROUNDING * abs(row.get("f_pos/median", 0.0))
        self.told_apart |= size > rounding
        self.sizes = [*self.sizes[1 - rule.rows :], min(size, sys.float_info.max)]
        # A size under the best median does not raise it, but for a hair.
        if size > self.best and len(self.sizes) == rule.rows:
            self.best = max(self.best, median(self.sizes))
        limit = max(rule.share * self.best, rounding)
        self.limit = limit
        if size > limit or not self.told_apart:
            return CALM
        if 4 * sum(past <= limit for past in self.sizes) < 3 * rule.rows:
            return NOT_CALM
        remedies = rule.remedies.at(row.get(BETA_STAR, math.nan))
        return Reading(Level.ERROR, False, "f_pos/std", spread, limit, rule.rows, remedies)

    def after_rollback(self) -> None:
        self.sizes = []


@typed
@dataclass(frozen=True)
class Bound:
    """A limit, exclusive, that the median of the last ``window`` values should keep to.

    Attributes:
        side: the side of the limit on which the median is out of range.
        level: the level that is reported, INFO or WARN.
    """

    tag: str
    side: Literal["above", "below"]
    limit: float
    window: int
    remedies: Remedies
    level: Level = Level.WARN

    def __post_init__(self) -> None:
        is_kept = self.window >= 1 and self.level < Level.ERROR
        check_settings(self, {f"window >= 1, level < {Level.ERROR:d}": is_kept})
        if self.tag.removeprefix("ref/").startswith("mixture/"):
            raise ConfigError(
                f"Bound of {self.tag!r}: rows have no numbers of a mixture's samplers any more. "
                "Sum ebmguard.objective.weights(f_neg, beta_star) over Mixture.parts, and g.log it."
            )


@typed
@dataclass(frozen=True)
class MedianRule:
    """Report a WARN or an INFO while a median over a window is out of bounds.

    Attributes:
        bounds: where several are broken, the first of the highest level speaks.
        reference_prefix: put before the tags at beta* = 0, where weights say nothing of themselves.
    """

    name: str
    bounds: tuple[Bound, ...]
    reference_prefix: str = ""
    error: type[DivergenceError] = DivergenceError

    def limits(self) -> dict[str, Limits]:
        """The limits of the bounds that warn."""
        limits: dict[str, Limits] = {}
        for bound in self.bounds:
            if bound.level is Level.WARN:
                above = bound.side == "above"
                interval = Limits(high=bound.limit) if above else Limits(low=bound.limit)
                limits[bound.tag] = interval.within(limits.get(bound.tag, interval))
        return limits

    def watcher(self) -> _MedianWatcher:
        """A new watcher."""
        return _MedianWatcher(self)


@dataclass
class _MedianWatcher(Memory):
    rule: MedianRule
    prefix: str = ""
    windows: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The last finite values of every bound's diagnostic: as they came, and in order.
        self.windows = [[] for _ in self.rule.bounds]
        self.ordered: list[list[float]] = [[] for _ in self.rule.bounds]
        tags = [bound.tag for bound in self.rule.bounds]
        self.tags = {x: [x + tag for tag in tags] for x in ("", self.rule.reference_prefix)}

    def read(self, row: Mapping[str, float]) -> Reading:
        bounds, beta_star = self.rule.bounds, row.get(BETA_STAR, math.nan)
        prefix = self.rule.reference_prefix if beta_star == 0 else ""
        values = [*map(row.get, self.tags[prefix])]
        if values.count(None) == len(values):
            return UNKNOWN  # such as the row of a step without a loss
        if prefix != self.prefix:
            self.prefix = prefix
            self.__post_init__()
        is_known, worst = False, None
        for bound, value, past, ordered in zip(
            bounds, values, self.windows, self.ordered, strict=True
        ):
            if value is not None and math.isfinite(value):
                if len(past) == bound.window:
                    del ordered[bisect_left(ordered, past.pop(0))]
                past.append(value)
                insort(ordered, value)
            if len(past) == bound.window:
                low, high = ordered[(bound.window - 1) // 2], ordered[bound.window // 2]
                # Halves first: the sum of two large floats may overflow.
                middle = low / 2 + high / 2 if low < high else low
                is_broken = middle > bound.limit if bound.side == "above" else middle < bound.limit
                if is_broken and (worst is None or bound.level > worst[0].level):
                    worst = bound, middle
                is_known = True
        if worst is None:
            return CALM if is_known else UNKNOWN
        bound, middle = worst
        tag, remedies = prefix + bound.tag, bound.remedies.at(beta_star)
        return Reading(bound.level, False, tag, middle, bound.limit, bound.window, remedies)

    def calm(self) -> tuple[float, float]:
        return _ANY  # it reports no ERROR

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        read = super()._read(state)
        for bound, window in zip(self.rule.bounds, read["windows"], strict=True):
            if len(window) > bound.window or not all(map(math.isfinite, window)):
                raise ValueError(f"{window} is no window of {bound.window} finite values")
        return read

    def _take(self, read: Mapping[str, Any]) -> None:
        super()._take(read)
        self.ordered = [sorted(window) for window in self.windows]


@typed
@dataclass(frozen=True)
class FloorRule:
    """Report a WARN, then an ERROR, while GradScale stays under its floor.

    ERROR is for beta* other than 0 only: there GradScale multiplies the gradient, and an adaptive
    optimiser amplifies what little is left of it (App. H).

    Attributes:
        tag, reference_tag: the diagnostic, and what is read instead at beta* = 0.
        floor: a step under it counts; over twice as much it is calm, and the count is 0.
        warn_patience, error_patience: steps under the floor before WARN and before ERROR.
    """

    name: str = "sampler_failing"
    tag: str = "grad_scale"
    reference_tag: str = "ref/grad_scale"
    floor: float = 0.1
    warn_patience: int = 20
    error_patience: int = 200
    remedies: Remedies = SAMPLER
    error: type[DivergenceError] = SamplerFailingError

    def __post_init__(self) -> None:
        is_kept = 1 <= self.warn_patience <= self.error_patience
        check_settings(self, {"1 <= warn_patience <= error_patience": is_kept})

    def limits(self) -> dict[str, Limits]:
        """The floor; an ERROR is a matter of patience."""
        return {self.tag: Limits(low=self.floor)}

    def watcher(self) -> _FloorWatcher:
        """A new watcher."""
        return _FloorWatcher(self)


@dataclass
class _FloorWatcher(Memory):
    rule: FloorRule
    source: str = ""
    count: int = 0

    def read(self, row: Mapping[str, float]) -> Reading:
        rule, beta_star = self.rule, row.get(BETA_STAR, math.nan)
        tag = rule.reference_tag if beta_star == 0 else rule.tag
        value = row.get(tag, math.nan)
        if math.isnan(value):
            return UNKNOWN
        if tag != self.source or value > 2 * rule.floor:
            # Healthy; or beta* moved to or from 0, and the count so far was of another quantity.
            self.source, self.count = tag, 0
        self.count += value < rule.floor
        if value >= rule.floor or self.count < rule.warn_patience:
            return CALM if value > 2 * rule.floor else NOT_CALM
        is_lost = self.count >= rule.error_patience and beta_star != 0
        level, remedies = Level.ERROR if is_lost else Level.WARN, rule.remedies.at(beta_star)
        return Reading(level, False, tag, value, rule.floor, self.count, remedies)

    def calm(self) -> tuple[float, float]:
        return _ANY  # it is a matter of patience

    def after_rollback(self) -> None:
        self.count = 0  # the run is no longer where it was counted
