"""The rule ``energy_blowup``: the energies leave the scale that the run has shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from ..errors import DivergenceError, EnergyBlowupError, typed
from ..tags import BETA_STAR, ENERGY_GAP, GRAD_SCALE, SAMPLER_GRAD_NORM, SAMPLER_UNIT
from .remedies import ABOVE_DATA_ERROR, ABOVE_DATA_WARN, BLOWUP_ERROR, BLOWUP_WARN, Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Level, Limits, Memory, Reading, check_settings

__all__ = ["GrowthRule"]

_OVERLAP, _SPREAD, _NAN = "energy_overlap", "f_pos/std", math.nan


@typed
@dataclass(frozen=True)
class GrowthRule:
    """Report an ERROR where the gap is out of line with the data's spread, or all energies grew.

    The past is the last 2.5 ``rows`` without the last half of ``rows``; no row of an ERROR enters.
    A row's size is |gap| + ``f_pos/std``, and its growth log((size + unit) / (record + unit)), with
    the largest size of the past for the record. Growth counts once the run's scale is known:
    energies have touched on ``rows`` rows that set no record.

    Attributes:
        spreads: the number of spreads of the data over which the gap is out of line: a WARN, and an
            ERROR where the size has outgrown its median by half of ``growth`` too, or at
            ``spreads`` squared. A spread is the geometric mean of the row's spread and the median
            one, and the latter at least.
        growth: the growth over which a row is a WARN. It is an ERROR where the log of the sampler's
            gradient norm has outgrown its record by half as much, or at twice the growth.
        rows: the number of rows that tell the run's scale.
        unit: the unit of f, under which no spread counts and no growth; times ``sampler/unit``,
            where the sampler's steps are known.
        edge: energies touch where the overlap P(f⁻ > f⁺) is so far from 0 and from 1.
        part: the part of pairs with f⁻ > f⁺ from which beta* > 0 takes the excess out of the loss,
            which is then a WARN, up to a gap of ``spreads`` squared.
        few: the negatives up to which one alone may carry the gap at beta* = 0: once the run's
            scale is known, that is an ERROR on the second row in a row, and a WARN on the first.
    """

    name: str = "energy_blowup"
    spreads: float = 30.0
    growth: float = 0.9
    rows: int = 20
    unit: float = 1.0
    edge: float = 0.15
    part: float = 0.01
    few: int = 8
    remedies: tuple[Remedies, Remedies] = (BLOWUP_WARN, BLOWUP_ERROR)  # of a WARN, of an ERROR
    remedies_above_data: tuple[Remedies, Remedies] = (ABOVE_DATA_WARN, ABOVE_DATA_ERROR)
    error: type[DivergenceError] = EnergyBlowupError

    def __post_init__(self) -> None:
        kept = {  # e^100 is out of reach of any energy, and no overflow
            "1 <= spreads <= 1e6": 1 <= self.spreads <= 1e6,
            "0 < growth <= 50": 0 < self.growth <= 50,
            "rows >= 2, unit > 0": self.rows >= 2 and self.unit > 0,
            "0 < edge < 0.5": 0 < self.edge < 0.5,
            "0 < part <= 1": 0 < self.part <= 1,
            "few >= 0": self.few >= 0,
        }
        check_settings(self, kept)

    def watcher(self) -> _GrowthWatcher:
        """A new watcher."""
        return _GrowthWatcher(self)


@dataclass
class _GrowthWatcher(Memory):
    rule: GrowthRule
    spreads: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    touched: int = 0
    was_over: bool = False  # whether the last row's size was over the limit of an ERROR

    # The sizes, for the row read last, that make a WARN, an ERROR, and one no weights absorb.
    warn_at = error_at = lost_at = math.inf
    spread = 0.0

    def read(self, row: Mapping[str, float]) -> Reading:
        rule = self.rule
        gap, spread = row.get(ENERGY_GAP, _NAN), row.get(_SPREAD, _NAN)
        if not math.isfinite(gap) or math.isnan(spread):
            return UNKNOWN
        overlap, norm = row.get(_OVERLAP, _NAN), row.get(SAMPLER_GRAD_NORM, _NAN)
        beta_star, size = row.get(BETA_STAR, _NAN), abs(gap) + spread
        touches = not min(overlap, 1 - overlap) < rule.edge
        self.spread = spread if math.isfinite(spread) else 0.0
        self._set_limits(self.spread, norm, rule.unit * row.get(SAMPLER_UNIT, 1.0))
        if gap > self.spread and beta_star > 0 and overlap >= rule.part:
            self.warn_at = min(self.warn_at, self.error_at)
            self.error_at = self.lost_at
        is_over = size > self.error_at or math.isinf(size)
        if is_over and not self.was_over and self._is_of_one(row):
            self.warn_at, self.error_at = min(self.warn_at, self.error_at), math.inf
        self.was_over, is_lost = is_over, size > self.error_at or math.isinf(size)
        if touches and self.touched < rule.rows and size <= max(self.sizes, default=0.0):
            self.touched += 1
        if not is_over:
            for past, value in (
                (self.spreads, spread),
                (self.sizes, size),
                (self.norms, norm if math.isfinite(norm) else 0.0),
            ):
                past.append(value)
                del past[: -2 * rule.rows - rule.rows // 2]
        if size <= min(self.error_at, self.warn_at):
            return CALM if touches else NOT_CALM
        level, limit = (Level.ERROR, self.error_at) if is_lost else (Level.WARN, self.warn_at)
        # The larger part is named, with its limit where the other stays as it is.
        tag, value, other = ENERGY_GAP, gap, spread
        if abs(gap) < spread:
            tag, value, other = _SPREAD, spread, abs(gap)
        limit = math.copysign(max(0.0, limit - other), value)
        pairs = rule.remedies_above_data if gap < 0 else rule.remedies
        return Reading(
            level, False, tag, value, limit, len(self.sizes), pairs[is_lost].at(beta_star)
        )

    def calm(self) -> tuple[float, float] | None:
        is_known = len(self.sizes) >= 2 * self.rule.rows and not self.was_over
        return (0.0, min(self.warn_at, self.error_at) / 2) if is_known else None

    def limits(self) -> dict[str, Limits]:
        error = max(0.0, self.error_at - self.spread)
        warn = min(max(0.0, self.warn_at - self.spread), error)
        return {ENERGY_GAP: Limits(-warn, warn, -error, error)}

    def _is_of_one(self, row: Mapping[str, float]) -> bool:
        """Return whether the size would not be over the limit without the most extreme negative."""
        grad_scale, gap = row.get(GRAD_SCALE, 1.0), row[ENERGY_GAP]
        if row.get(BETA_STAR) != 0 or self.touched < self.rule.rows or not 0 < grad_scale < 1:
            return False
        others = round(grad_scale / (1 - grad_scale)) - 1  # M / (M + 1) at beta* = 0
        extreme = row.get("f_neg/min" if gap > 0 else "f_neg/max", _NAN)
        mean = row.get("f_neg/mean", _NAN)
        rest = gap + (extreme - mean) / max(1, others)
        return 0 < others < self.rule.few and abs(rest) + self.spread <= self.error_at

    def _set_limits(self, spread: float, norm: float, unit: float) -> None:
        rule = self.rule
        # Without the last rows, so that a blow-up is compared with what was before it.
        past = max(1, len(self.sizes) - rule.rows // 2)
        usual = max(unit, median(self.spreads[:past] or [spread]))
        one = math.sqrt(usual * max(usual, spread))
        outgrown = median(self.sizes[:past] or [0.0]) * math.exp(rule.growth / 2)
        self.warn_at = rule.spreads * one + spread
        self.lost_at = rule.spreads**2 * usual + spread
        self.error_at = min(max(self.warn_at, outgrown), rule.spreads**2 * one + spread)
        if self.touched >= rule.rows:
            record, steepest = max(self.sizes[:past]) + unit, max(self.norms[:past])
            is_steeper = 0 < steepest * math.exp(rule.growth / 2) < norm
            growth = rule.growth if is_steeper else 2 * rule.growth
            self.warn_at = min(self.warn_at, record * math.exp(rule.growth) - unit)
            self.error_at = min(self.error_at, record * math.exp(growth) - unit)
