"""``energy_blowup``: robust bands around the run's own recent past."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError, DivergenceError, EnergyBlowupError
from .alert import Level
from .remedies import BLOWUP_ERROR, BLOWUP_WARN, Remedies
from .rule import Limits, Reading
from .statistics import MAD_TO_SIGMA, RollingWindow

__all__ = ["BandRule", "Series"]

_NAN = math.nan
_RESOLUTION = 1e-6  # of float32: a constant series with a large offset jitters by this much
_TINY = 1e-30


@dataclass(frozen=True)
class Series:
    """One diagnostic with a band around the median of the run's own recent past.

    The distance is |x - median| / max(1.4826 MAD, floor), in robust standard deviations.

    Attributes:
        tag: the diagnostic.
        warn: distance from which the series has left its band.
        error: distance from which that alone is an ERROR; a smaller one counts as its share of it
            (see :class:`BandRule`). Infinite for a series that only warns.
        side: which direction counts.
        log: compare logarithms: for positive quantities that grow by factors.
        floor_tag: a within-batch spread in the same units; None where ``log`` needs none.
        floor: the scale is at least this many spreads (of logs: at least this), so that a series
            that stands still does not make every ripple an alarm.
        absorbed: the direction in which beta* > 0 takes the excess out of the loss; None for none.
        cap, early_cap: |x| over which it is an ERROR whatever the past, times the unit of the run;
            the second while there is no band yet.
        most: the largest share of an ERROR that it has; below 1, it makes none alone.
    """

    tag: str
    warn: float
    error: float
    side: Literal["both", "up", "down"] = "both"
    log: bool = False
    floor_tag: str | None = None
    floor: float = 0.1
    absorbed: Literal["up", "down"] | None = None
    cap: float = math.inf
    early_cap: float = math.inf
    most: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.warn <= self.error:
            raise ConfigError(
                f"Series {self.tag!r}: expected 0 < warn <= error, "
                f"but got warn={self.warn} and error={self.error}."
            )


@dataclass(frozen=True)
class BandRule:
    """WARN and ERROR when energies or the sampler's gradient leave the band of their own past.

    A blow-up moves several series at once, so what they say adds up: each is divided by its own
    ``error`` distance, and the row is an ERROR where these shares sum to 1 or more, or where one
    series is beyond its cap. Where beta* > 0 absorbs the excess, a series has no share and reaches
    WARN at most (its cap stays in force): negatives far below the rest get no weight, and the
    negative force rests on those that compete. The row itself tells: at least ``overlap_floor`` of
    the pairs have f_neg > f_pos, and this part times the depth of the tail, beta* (q95 - min of
    f_neg), is at least ``absorb_nats``.

    Attributes:
        window: past observations in the band.
        min_count: observations before the band is used; caps hold from step 0.
        clear: distance below which a series is calm again.
        rebaseline: a series that does not come back forms its band anew after this many
            observations. Values beyond the cap never enter a band.
        begins: observations in which the run begins. A network that has not learned anything yet
            has energies near 0, and all of them grow by factors, also in runs that are well.
        begins_gap: while the run begins, an ERROR needs a gap of at least this, times the unit of
            the run; less than that is a WARN.
        overlap_floor, absorb_nats: see above; a fraction of the pairs, and nats.
        name, calm_steps, cooldown, error: see :class:`~ebmguard.alerts.Rule`.
    """

    series: tuple[Series, ...]
    name: str = "energy_blowup"
    window: int = 64
    min_count: int = 20
    clear: float = 4.0
    rebaseline: int = 50
    begins: int = 100
    begins_gap: float = 2.0
    overlap_floor: float = 0.01
    absorb_nats: float = 1.0
    calm_steps: int = 10
    cooldown: int = 200
    remedies_warn: Remedies = BLOWUP_WARN
    remedies_error: Remedies = BLOWUP_ERROR
    error: type[DivergenceError] = EnergyBlowupError

    def __post_init__(self) -> None:
        if not 1 <= self.min_count <= min(self.window, self.rebaseline):
            raise ConfigError(
                f"Rule {self.name!r}: expected 1 <= min_count <= window and rebaseline, but got "
                f"min_count={self.min_count}, window={self.window}, rebaseline={self.rebaseline}."
            )
        if not self.absorb_nats > 0:
            raise ConfigError(
                f"Rule {self.name!r}: expected absorb_nats > 0, but got {self.absorb_nats}: "
                "beta* = 0 would count as absorbing."
            )
        tags = [series.tag for series in self.series]
        if len(set(tags)) != len(tags):
            raise ConfigError(f"Rule {self.name!r}: expected one series a tag, but got {tags}.")

    def watcher(self) -> _BandWatcher:
        """A new watcher."""
        return _BandWatcher(self)


class _Track:
    """The past of one series, and how far the value read last lies from its band."""

    def __init__(self, series: Series, rule: BandRule) -> None:
        self.series = series
        self.rule = rule
        self.window = RollingWindow(rule.window)
        self.away: list[float] = []  # the values since it last left its band
        self.inside = 0
        self.centre = self.scale = self.value = self.cap = _NAN
        # On the scale of the band: the signed distance, and that on the side that counts.
        self.signed = self.z = 0.0
        self.share = 0.0  # of an ERROR, which shares of 1 in sum make
        self.has_left = self.is_beyond_cap = False

    def read(
        self, row: Mapping[str, float], spread: float, unit: float, is_absorbing: bool
    ) -> bool:
        """Compare the row's value with the band and take it in; whether it is known."""
        series = self.series
        self.value = row.get(series.tag, _NAN)
        if not math.isfinite(self.value) or (series.log and self.value <= 0):
            return False
        x = math.log(self.value) if series.log else self.value
        if has_band := len(self.window) >= self.rule.min_count:
            self.centre = self.window.median()
            lowest = max(_RESOLUTION * abs(self.centre), _TINY, series.floor * spread)
            mad = self.window.mad(self.centre)
            self.scale = max(MAD_TO_SIGMA * mad, series.floor if series.log else lowest)
            self.signed = (x - self.centre) / self.scale
        else:
            self.centre = self.scale = _NAN
            self.signed = 0.0
        self.z = {"both": abs(self.signed), "up": self.signed, "down": -self.signed}[series.side]
        self.cap = unit * (series.cap if has_band else min(series.cap, series.early_cap))
        self.is_beyond_cap = abs(self.value) > self.cap
        self.has_left = self.z >= series.warn or self.is_beyond_cap
        is_absorbed = is_absorbing and series.absorbed == ("up" if self.signed > 0 else "down")
        self.share = 0.0 if is_absorbed else min(max(0.0, self.z / series.error), series.most)
        self._take(x)
        return True

    def _take(self, x: float) -> None:
        """Remember x. A value that left the band stays out of it until the band is re-formed."""
        rule = self.rule
        if not self.has_left:
            self.window.push(x)
        self.inside = self.inside + 1 if self.z < rule.clear and not self.is_beyond_cap else 0
        if self.inside >= max(1, rule.calm_steps):
            self.away.clear()
        if (self.has_left or self.away) and not self.is_beyond_cap:
            self.away.append(x)
            if len(self.away) >= rule.rebaseline:
                self.window = RollingWindow(rule.window, self.away)
                self.away.clear()

    def at(self, distance: float) -> float:
        """The value at a signed distance from the centre."""
        edge = self.centre + distance * self.scale
        return math.exp(min(edge, 700.0)) if self.series.log else edge

    def limit(self, distance: float) -> float:
        """The value at a distance, on the side of the value read last."""
        return self.at(math.copysign(distance, self.signed))

    def limits(self, unit: float) -> Limits:
        """What held for the value read last."""
        series, cap = self.series, self.series.cap * unit
        low, high, error_low, error_high = -math.inf, math.inf, -cap, cap
        has_band = not math.isnan(self.centre)
        if has_band and series.side != "up":
            low, error_low = self.at(-series.warn), max(error_low, self.at(-series.error))
        if has_band and series.side != "down":
            high, error_high = self.at(series.warn), min(error_high, self.at(series.error))
        return Limits(low, high, error_low, error_high)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window.values(), "away": list(self.away), "inside": self.inside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window = RollingWindow(self.rule.window, state["window"])
        self.away = [float(x) for x in state["away"]]
        self.inside = int(state["inside"])


class _BandWatcher:
    def __init__(self, rule: BandRule) -> None:
        self.rule = rule
        self.tracks = [_Track(series, rule) for series in rule.series]
        tags = {series.floor_tag for series in rule.series if series.floor_tag is not None}
        self.spreads = {tag: RollingWindow(rule.window) for tag in sorted(tags)}
        # Of the caps: 1 for energies of order 1 to 10; someone whose energies are a thousand times
        # larger starts at thousands, not at log(10).
        self.unit: float | None = None
        self.count = 0  # of known gaps

    def read(self, row: Mapping[str, float]) -> Reading:
        rule = self.rule
        first, gap = abs(row.get("f_pos/median", _NAN)), abs(row.get("energy_gap", _NAN))
        if self.unit is None and math.isfinite(first):
            self.unit = max(1.0, first / 10)
        unit = self.unit or 1.0
        self.count += math.isfinite(gap)
        is_beginning = self.count <= rule.begins and gap < rule.begins_gap * unit
        spreads = {tag: window.median() for tag, window in self.spreads.items() if len(window)}
        is_absorbing = self._is_absorbing(row)
        found = [
            track
            for track in self.tracks
            if track.read(row, spreads.get(track.series.floor_tag or "", 0.0), unit, is_absorbing)
        ]
        left = [track for track in found if track.has_left]
        beyond_cap = [track for track in left if track.is_beyond_cap]
        total = sum(track.share for track in found)
        if not left:
            for tag, window in self.spreads.items():
                if math.isfinite(spread := row.get(tag, _NAN)):
                    window.push(spread)
        level, remedies = Level.ERROR, rule.remedies_error
        if beyond_cap:
            worst = max(beyond_cap, key=lambda track: track.share)
            limit = worst.cap
        elif total >= 1 and not is_beginning:
            worst = max(found, key=lambda track: track.share)
            # Where the shares would add up to 1 if the other series stayed as they are.
            missing = 1.0 if worst.share >= 1 else max(0.0, 1.0 - (total - worst.share))
            limit = worst.limit(missing * worst.series.error)
        elif left:
            level, remedies = Level.WARN, rule.remedies_warn
            worst = max(left, key=lambda track: track.z / track.series.warn)
            limit = worst.limit(worst.series.warn)
        else:
            return Reading(None, all(track.z < rule.clear for track in found) if found else None)
        pair = remedies.at(row.get("beta_star", _NAN))
        return Reading(level, False, worst.series.tag, worst.value, limit, len(worst.window), pair)

    def limits(self) -> dict[str, Limits]:
        return {track.series.tag: track.limits(self.unit or 1.0) for track in self.tracks}

    def _is_absorbing(self, row: Mapping[str, float]) -> bool:
        """Never for beta* <= 0, nor where one of the numbers is unknown."""
        overlap = row.get("energy_overlap", _NAN)
        tail = row.get("f_neg/q95", _NAN) - row.get("f_neg/min", _NAN)
        depth = row.get("beta_star", _NAN) * tail
        return overlap >= self.rule.overlap_floor and overlap * depth >= self.rule.absorb_nats

    def state_dict(self) -> dict[str, Any]:
        return {
            "tracks": {track.series.tag: track.state_dict() for track in self.tracks},
            "spreads": {tag: window.values() for tag, window in self.spreads.items()},
            "unit": self.unit,
            "count": self.count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for track in self.tracks:
            track.load_state_dict(state["tracks"][track.series.tag])
        for tag in self.spreads:
            self.spreads[tag] = RollingWindow(self.rule.window, state["spreads"][tag])
        self.unit = None if state["unit"] is None else float(state["unit"])
        self.count = int(state["count"])
