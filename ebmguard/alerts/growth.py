"""``energy_blowup``: the energies outgrow all that the run has shown at its present scale."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from ..errors import DivergenceError, EnergyBlowupError, typed
from ..tags import BETA_STAR, ENERGY_GAP, SAMPLER_GRAD_NORM
from .remedies import ABOVE_DATA_ERROR, ABOVE_DATA_WARN, BLOWUP_ERROR, BLOWUP_WARN, Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Level, Limits, Memory, Reading, check_settings

__all__ = ["GrowthRule"]

_OVERLAP, _SPREAD, _NAN = "energy_overlap", "f_pos/std", math.nan


@typed
@dataclass(frozen=True)
class GrowthRule:
    """WARN and ERROR when the energies outgrow the run's own past by factors.

    The size of the energies is |gap| + ``f_pos/std``, and growth log((size + unit) / (record +
    unit)), where the record is the largest size of the last ``window`` rows but the last ``lag``,
    rows in ERROR left out.
    It counts once the run first came within a factor e of its record ``settle`` steps ago.

    A slow blow-up carries its past along. Energies touch where the overlap P(f⁻ > f⁺) is at least
    ``touch`` away from 0 and 1; once they have not for ``slow_steps``, the size is compared with
    the last ``window`` at which they did.

    Attributes:
        warn: growth over which a row is a WARN.
        growth: over which it is an ERROR where the overlap is within ``apart`` of 0 or 1, or the
            log of the sampler's gradient norm has outgrown its own record by ``steeper``.
        growth_alone: over which it is one without such a witness.
        start, start_negative: the gap above 0, and below it, over which a row is an ERROR before
            that; times the size of the first row or a tenth of its |f_pos/median| where above 1.
        absorb_nats: the share of pairs with f⁻ > f⁺, times beta* (q95 - min of f⁻), from which
            beta* > 0 takes the excess out of the loss: growth up to ``lost`` is then a WARN.
        slow: growth over which a slow blow-up is an ERROR.
        unit: in units of f; what is far under it does not count as growth.
    """

    name: str = "energy_blowup"
    warn: float = 0.5
    growth: float = 0.9
    growth_alone: float = 1.4
    apart: float = 0.25
    steeper: float = 0.5
    settle: int = 20
    start: float = 100.0
    start_negative: float = 250.0
    absorb_nats: float = 1.0
    lost: float = 5.0
    touch: float = 0.15
    slow: float = 0.7
    slow_steps: int = 16
    lag: int = 8
    window: int = 64
    unit: float = 1.0
    calm_steps: int = 10
    cooldown: int = 200
    remedies: tuple[Remedies, Remedies] = (BLOWUP_WARN, BLOWUP_ERROR)  # of a WARN, of an ERROR
    remedies_above_data: tuple[Remedies, Remedies] = (ABOVE_DATA_WARN, ABOVE_DATA_ERROR)
    error: type[DivergenceError] = EnergyBlowupError

    def __post_init__(self) -> None:
        check_settings(  # e^100 is out of reach of any energy, and no overflow
            self,
            "0 < warn <= growth <= growth_alone <= 100",
            "0 < apart <= 0.5",
            "0 <= steeper <= 100",
            "start > 0, start_negative > 0, unit > 0",
            "absorb_nats > 0, 0 < lost <= 100",
            "0 < touch < 0.5, 0 < slow <= 100",
            "settle >= 0, slow_steps >= 1",
            "1 <= lag < window",
        )

    def watcher(self) -> _GrowthWatcher:
        """A new watcher."""
        return _GrowthWatcher(self)


@dataclass
class _GrowthWatcher(Memory):
    rule: GrowthRule
    sizes: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    touching: list[float] = field(default_factory=list)  # the last sizes at which the energies did
    count: int = 0
    apart_for: int = 0
    start_unit: float = 0.0
    # The steps at which the size was larger than ever before, and how large.
    records: list[tuple[int, float]] = field(default_factory=list)

    # Of the row read last: what size makes a WARN and an ERROR.
    warn_at = error_at = math.inf
    spread = 0.0

    def read(self, row: Mapping[str, float]) -> Reading:
        rule = self.rule
        gap, spread = row.get(ENERGY_GAP, _NAN), row.get(_SPREAD, _NAN)
        if not math.isfinite(gap) or math.isnan(spread):
            return UNKNOWN
        self.spread, size = spread, abs(gap) + spread
        median = abs(row.get("f_pos/median", 0.0)) / 10
        record, steepest = self._record(self.sizes), self._record(self.norms)
        norm = row.get(SAMPLER_GRAD_NORM, _NAN)
        steeper = norm > steepest * math.exp(rule.steeper)
        age = self._age(record)
        self.count += 1
        if not self.start_unit:
            self.start_unit = max(rule.unit, size, median if math.isfinite(median) else 0.0)
        overlap = row.get(_OVERLAP, 0.5)
        edge = min(overlap, 1 - overlap)
        growth = rule.growth if edge < rule.apart or steeper else rule.growth_alone
        slow_at = self._slow_at(edge)
        depth = row.get(BETA_STAR, _NAN) * (row.get("f_neg/q95", _NAN) - row.get("f_neg/min", _NAN))
        # Never at beta* <= 0, nor where one of the numbers is unknown.
        if gap > 0 and _OVERLAP in row and overlap >= 0.01 and overlap * depth >= rule.absorb_nats:
            growth, slow_at = rule.lost, math.inf
        if is_settled := age >= rule.settle:
            self.warn_at = (record + rule.unit) * math.exp(rule.warn) - rule.unit
            self.error_at = (record + rule.unit) * math.exp(growth) - rule.unit
        else:
            start = rule.start if gap > 0 else rule.start_negative
            self.warn_at, self.error_at = math.inf, start * self.start_unit + spread
        self.error_at = min(self.error_at, slow_at)
        if not (is_lost := size > self.error_at):
            self._add(size, norm, edge)
        if size <= min(self.error_at, self.warn_at):
            return CALM if 2 * (size - record) < self.warn_at - record else NOT_CALM
        level, limit = (Level.ERROR, self.error_at) if is_lost else (Level.WARN, self.warn_at)
        # Whichever is the larger part, and the limit of it where the other stays as it is.
        tag, value, other = ENERGY_GAP, gap, spread
        if abs(gap) < spread:
            tag, value, other = _SPREAD, spread, abs(gap)
        limit = math.copysign(max(0.0, limit - other), value)
        pairs = rule.remedies_above_data if gap < -spread else rule.remedies
        remedies = pairs[is_lost].at(row.get(BETA_STAR, _NAN))
        window = rule.window if is_settled else 0
        return Reading(level, False, tag, value, limit, window, remedies)

    def limits(self) -> dict[str, Limits]:
        error = max(0.0, self.error_at - self.spread)
        warn = min(max(0.0, self.warn_at - self.spread), error)
        return {ENERGY_GAP: Limits(-warn, warn, -error, error)}

    def _record(self, past: Sequence[float]) -> float:
        return max(past[: max(0, len(past) - self.rule.lag + 1)], default=_NAN)

    def _slow_at(self, edge: float) -> float:
        rule, touching = self.rule, self.touching
        self.apart_for = self.apart_for + 1 if edge < rule.touch else 0
        if self.apart_for < rule.slow_steps or len(touching) < rule.window:
            return math.inf
        return (max(touching) + rule.unit) * math.exp(rule.slow) - rule.unit

    def _age(self, record: float) -> int:
        """Steps since the run first came within a factor e of its record; -1 if it has none."""
        if math.isnan(record):
            return -1
        first = bisect_left(self.records, record / math.e, key=itemgetter(1))
        return self.count - self.records[first][0] if first < len(self.records) else 0

    def _add(self, size: float, norm: float, edge: float) -> None:
        if edge >= self.rule.touch:
            self.touching.append(size)
            del self.touching[: -self.rule.window]
        for past, value in ((self.sizes, size), (self.norms, norm)):
            if math.isfinite(value):
                past.append(value)
                del past[: 1 - self.rule.window]
        # By a part, which keeps the list short where it grows for ever.
        if math.isfinite(size) and (not self.records or size > 1.01 * self.records[-1][1]):
            self.records.append((self.count - 1, size))
