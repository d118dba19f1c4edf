"""``energy_blowup``: the energy gap outgrows all that the run has shown at its present scale."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ..errors import ConfigError, DivergenceError, EnergyBlowupError
from ..tags import BETA_STAR, ENERGY_GAP, SAMPLER_GRAD_NORM
from .alert import Level
from .remedies import BLOWUP_ERROR, BLOWUP_WARN, Remedies
from .rule import CALM, NOT_CALM, UNKNOWN, Limits, Reading
from .statistics import RollingWindow

__all__ = ["GrowthRule"]

_OVERLAP, _SPREAD = "energy_overlap", "f_pos/std"
_NAN = math.nan


@dataclass(frozen=True)
class GrowthRule:
    """WARN and ERROR when the energy gap outgrows its own past by factors.

    Growth is the logarithm of (|gap| + u) / (g + u). g is the largest \\|gap\\| of the last
    ``window`` steps but the last ``lag``, and u the spread of the data's energies some steps
    before, or ``unit`` where that is smaller. A blow-up multiplies the gap every few steps; a
    healthy gap keeps to the range that it has had.

    A start grows by factors as well, until the energies have found their scale. That is seen from
    the run: growth counts once the run first came within a factor e of its present range at least
    ``settle`` steps ago. Before that only a gap of ``start`` u is an ERROR.

    Where beta* > 0 takes the excess out of the loss, growth is a WARN at most: negatives far below
    the rest get no weight, and the negative force rests on those that compete. The row tells: part
    of the pairs have f⁻ > f⁺, and this part times the depth of the tail, beta* (q95 - min of f⁻),
    is at least ``absorb_nats``. What the weights cannot take out is an excess of the data's side:
    where the spread of its energies has grown by ``growth_alone`` too, nothing is absorbed.

    Attributes:
        growth: over which a row is an ERROR where one of two witnesses agrees: the energies are
            apart (the overlap P(f⁻ > f⁺) is under ``apart`` or over 1 - ``apart``), or the
            sampler's gradient norm has outgrown its own past by ``steeper``, in logarithms.
        growth_alone: over which it is one without a witness.
        warn: growth over which a row is a WARN.
        apart, steeper, start, settle, lag, window, unit: see above; steps, and units of f.
        spread_window, spread_delay: u is a median over so many steps, so many steps before.
        name, calm_steps, cooldown, error: see :class:`~ebmguard.alerts.Rule`.
    """

    name: str = "energy_blowup"
    growth: float = 0.7
    growth_alone: float = 1.2
    warn: float = 0.5
    apart: float = 0.25
    steeper: float = 0.5
    start: float = 100.0
    settle: int = 20
    lag: int = 8
    window: int = 64
    unit: float = 1.0
    absorb_nats: float = 1.0
    spread_window: int = 32
    spread_delay: int = 4
    calm_steps: int = 10
    cooldown: int = 200
    remedies_warn: Remedies = BLOWUP_WARN
    remedies_error: Remedies = BLOWUP_ERROR
    error: type[DivergenceError] = EnergyBlowupError

    def __post_init__(self) -> None:
        growths = 0 < self.warn <= self.growth <= self.growth_alone <= 100
        sizes = self.start > 0 and self.unit > 0 and self.absorb_nats > 0
        spreads = self.spread_window >= 1 and self.spread_delay >= 0
        # e^100 is out of reach of any energy, and no overflow.
        for is_kept, expected in (
            (growths, "0 < warn <= growth <= growth_alone <= 100"),
            (0 < self.apart <= 0.5, "0 < apart <= 0.5"),
            (0 <= self.steeper <= 100, "0 <= steeper <= 100"),
            (sizes, "start > 0, unit > 0, absorb_nats > 0"),
            (self.settle >= 0, "settle >= 0"),
            (1 <= self.lag < self.window, "1 <= lag < window"),
            (spreads, "spread_window >= 1, spread_delay >= 0"),
        ):
            if not is_kept:
                names = re.findall("[a-z_]+", expected)
                got = ", ".join(f"{name}={getattr(self, name)}" for name in names)
                raise ConfigError(f"Rule {self.name!r}: expected {expected}, but got {got}.")

    def watcher(self) -> _GrowthWatcher:
        """A new watcher."""
        return _GrowthWatcher(self)


class _Past:
    """The last values of a positive series, and the largest of them but the newest."""

    def __init__(self, rule: GrowthRule, values: Sequence[float] = ()) -> None:
        self.rule = rule
        self.values = list(map(float, values))

    def highest(self) -> float:
        """Of the window but its last steps; NaN where there is none."""
        return max(self.values[: max(0, len(self.values) - self.rule.lag + 1)], default=_NAN)

    def push(self, value: float) -> None:
        self.values.append(value)
        if len(self.values) > self.rule.window - 1:
            del self.values[0]


class _GrowthWatcher:
    def __init__(self, rule: GrowthRule) -> None:
        self.rule = rule
        self.gaps = _Past(rule)
        self.norms = _Past(rule)
        self.spreads = RollingWindow(rule.spread_window)
        self.recent: list[float] = []  # spreads that are not old enough for the window
        self.count = 0
        # Each step at which |gap| and spread together were larger than ever before, by a part that
        # keeps the list short where they grow for ever; and how large.
        self.records: list[tuple[int, float]] = []
        self.warn_at = self.error_at = math.inf

    def read(self, row: Mapping[str, float]) -> Reading:
        rule = self.rule
        gap, spread = row.get(ENERGY_GAP, _NAN), row.get(_SPREAD, _NAN)
        if not math.isfinite(gap):
            return UNKNOWN
        size, usual = abs(gap), self.spreads.median() if len(self.spreads) else spread
        usual = usual if math.isfinite(usual) else 0.0
        unit = max(usual, rule.unit)
        before = self.gaps.highest()
        age = self._age(before + usual)
        norm, steepest = row.get(SAMPLER_GRAD_NORM, _NAN), self.norms.highest()
        steeper = norm > steepest * math.exp(rule.steeper)
        self._take(size, spread, usual, norm)
        overlap = row.get(_OVERLAP, 0.5)
        is_apart = min(overlap, 1 - overlap) < rule.apart
        growth = rule.growth if is_apart or steeper else rule.growth_alone
        # The same as limits of |gap|; until the run has settled there is one alone.
        self.warn_at, self.error_at, window = math.inf, rule.start * unit, 0
        if age >= rule.settle:
            window = rule.window
            self.warn_at = (before + unit) * math.exp(rule.warn) - unit
            self.error_at = (before + unit) * math.exp(growth) - unit
        beta_star = row.get(BETA_STAR, _NAN)
        if size > self.error_at and self._absorbs(row, unit):
            self.error_at = math.inf
        if size > self.error_at:
            level, limit, remedies = Level.ERROR, self.error_at, rule.remedies_error
        elif size > self.warn_at:
            level, limit, remedies = Level.WARN, self.warn_at, rule.remedies_warn
        else:
            return CALM if 2 * (size - before) < self.warn_at - before else NOT_CALM
        limit = math.copysign(limit, gap)
        return Reading(level, False, ENERGY_GAP, gap, limit, window, remedies.at(beta_star))

    def _absorbs(self, row: Mapping[str, float], unit: float) -> bool:
        """Never at beta* <= 0 or for a negative gap, nor where one of the numbers is unknown."""
        overlap, tail = (
            row.get(_OVERLAP, _NAN),
            row.get("f_neg/q95", _NAN) - row.get("f_neg/min", _NAN),
        )
        depth = row.get(BETA_STAR, _NAN) * tail
        if not row.get(_SPREAD, _NAN) < unit * math.exp(self.rule.growth_alone):
            return False
        return row[ENERGY_GAP] > 0 and overlap >= 0.01 and overlap * depth >= self.rule.absorb_nats

    def limits(self) -> dict[str, Limits]:
        """Of the row read last."""
        warn, error = min(self.warn_at, self.error_at), self.error_at
        return {ENERGY_GAP: Limits(-warn, warn, -error, error)}

    def _age(self, size: float) -> int:
        """Steps since the run first came within a factor e of this size; -1 if it has no past."""
        if math.isnan(size):
            return -1
        first = bisect_left(self.records, size / math.e, key=itemgetter(1))
        return self.count - self.records[first][0] if first < len(self.records) else 0

    def _take(self, size: float, spread: float, usual: float, norm: float) -> None:
        self.gaps.push(size)
        if math.isfinite(norm):
            self.norms.push(norm)
        if math.isfinite(spread):
            self.recent.append(spread)
        if len(self.recent) > self.rule.spread_delay:
            self.spreads.push(self.recent.pop(0))
        if not self.records or size + usual > 1.01 * self.records[-1][1]:
            self.records.append((self.count, size + usual))
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "gaps": list(self.gaps.values),
            "norms": list(self.norms.values),
            "spreads": self.spreads.values(),
            "recent": list(self.recent),
            "count": self.count,
            "records": list(map(list, self.records)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rule = self.rule
        self.gaps, self.norms = _Past(rule, state["gaps"]), _Past(rule, state["norms"])
        self.spreads = RollingWindow(rule.spread_window, state["spreads"])
        self.recent = [float(x) for x in state["recent"]]
        self.count = int(state["count"])
        self.records = [(int(step), float(size)) for step, size in state["records"]]
