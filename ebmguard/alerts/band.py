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
# The scale is never below float32's resolution of the centre: a constant series with a large
# offset still jitters by this much.
_RESOLUTION = 1e-6
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
            that happens to stand still does not make every ripple an alarm.
        absorbed: the direction in which beta* > 0 takes the excess out of the loss, because the
            negatives responsible get no weight; None if no direction is harmless.
        cap: |x| from which it is an ERROR whatever the past; times the unit of the run.
        early_cap: a tighter one while there is no past to make a band of.
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
        overlap_floor: see above; a fraction of the pairs.
        absorb_nats: see above; in nats.
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
                f"Rule {self.name!r}: expected absorb_nats > 0 (at 0, beta* = 0 would count as "
                f"absorbing), but got {self.absorb_nats}."
            )
        tags = [series.tag for series in self.series]
        if len(set(tags)) != len(tags):
            raise ConfigError(f"Rule {self.name!r}: expected one series a tag, but got {tags}.")

    def watcher(self) -> BandWatcher:
        """A new watcher."""
        return BandWatcher(self)


class _Track:
    """The past of one series: its band, and the values since it last left it."""

    def __init__(self, series: Series, rule: BandRule) -> None:
        self.series = series
        self.rule = rule
        self.window = RollingWindow(rule.window)
        self.away: list[float] = []
        self.inside = 0
        self.centre = _NAN
        self.scale = _NAN

    def distance(self, x: float, spread: float) -> float:
        """Signed distance of x from the band's centre, positive on the side that counts."""
        window, series = self.window, self.series
        if len(window) < self.rule.min_count:
            self.centre = self.scale = _NAN
            return 0.0
        centre = window.median()
        scale = MAD_TO_SIGMA * window.mad(centre)
        if series.log:
            scale = max(scale, series.floor)
        else:
            scale = max(scale, _RESOLUTION * abs(centre), _TINY)
            if not math.isnan(spread):
                scale = max(scale, series.floor * spread)
        self.centre, self.scale = centre, scale
        return (x - centre) / scale

    def take(self, x: float, z: float, beyond_cap: bool) -> bool:
        """Remember x. A value that left the band stays out of it until the band is re-formed.

        Returns whether the series is outside its band.
        """
        outside = z >= self.series.warn or beyond_cap
        if not outside:
            self.window.push(x)
        if z < self.rule.clear and not beyond_cap:
            self.inside += 1
            if self.inside >= self.rule.calm_steps:
                self.away.clear()
        else:
            self.inside = 0
        if (outside or self.away) and not beyond_cap:
            self.away.append(x)
            if len(self.away) >= self.rule.rebaseline:
                self.window = RollingWindow(self.rule.window, self.away)
                self.away.clear()
        return outside

    def limit(self, threshold: float, x: float) -> float:
        """The value, on x's side of the centre, at which the distance is the threshold."""
        edge = self.centre + math.copysign(threshold * self.scale, x - self.centre)
        return math.exp(min(edge, 700.0)) if self.series.log else edge

    def limits(self, unit: float) -> Limits:
        """What held for the value read last."""
        series, cap = self.series, self.series.cap * unit
        if math.isnan(self.centre):
            return Limits(error_low=-cap, error_high=cap)
        down, up = series.side != "up", series.side != "down"
        return Limits(
            self.limit(series.warn, -math.inf) if down else -math.inf,
            self.limit(series.warn, math.inf) if up else math.inf,
            max(-cap, self.limit(series.error, -math.inf)) if down else -cap,
            min(cap, self.limit(series.error, math.inf)) if up else cap,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window.values(), "away": list(self.away), "inside": self.inside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window = RollingWindow(self.rule.window, state["window"])
        self.away = [float(x) for x in state["away"]]
        self.inside = int(state["inside"])


@dataclass(frozen=True, slots=True)
class _Distance:
    """How far one series lies from its band.

    Attributes:
        track: the series and its past.
        value, x: the diagnostic, and the same on the scale of the band.
        z: distance on the side that counts, in robust standard deviations.
        share: what it contributes to an ERROR, which is made by shares of 1 in sum.
        left: whether it is outside its band.
        beyond_cap: whether it is an ERROR whatever the past.
    """

    track: _Track
    value: float
    x: float
    z: float
    share: float
    left: bool
    beyond_cap: bool

    def limit_with(self, total: float) -> float:
        """The value at which the shares would add up to 1 if the other series stayed as they are;
        the ERROR distance of a series that reaches it alone."""
        missing = 1.0 if self.share >= 1 else max(0.0, 1.0 - (total - self.share))
        return self.track.limit(missing * self.track.series.error, self.x)


class BandWatcher:
    """Tracks every series of the rule, the within-batch spreads and the unit of the run."""

    def __init__(self, rule: BandRule) -> None:
        self.rule = rule
        self.tracks = [_Track(series, rule) for series in rule.series]
        tags = {series.floor_tag for series in rule.series if series.floor_tag is not None}
        self.spreads = {tag: RollingWindow(rule.window) for tag in sorted(tags)}
        self.unit: float | None = None
        self.count = 0  # of known gaps

    def read(self, row: Mapping[str, float]) -> Reading:
        """Compare every series with its band; the shares of an ERROR add up."""
        found = self._distances(row)
        is_beginning = self._is_beginning(row)
        left = [each for each in found if each.left]
        if not left:
            self._push_spreads(row)
        total = sum(each.share for each in found)
        beyond_cap = [each for each in left if each.beyond_cap]
        if beyond_cap or (total >= 1 and not is_beginning):
            level, remedies = Level.ERROR, self.rule.remedies_error
            worst = max(beyond_cap or found, key=lambda each: each.share)
            limit = self._cap(worst.track) if beyond_cap else worst.limit_with(total)
        elif left:
            level, remedies = Level.WARN, self.rule.remedies_warn
            worst = max(left, key=lambda each: each.z / each.track.series.warn)
            limit = worst.track.limit(worst.track.series.warn, worst.x)
        else:
            return Reading(None, all(each.z < self.rule.clear for each in found) if found else None)
        tag, window = worst.track.series.tag, len(worst.track.window)
        pair = remedies.at(row.get("beta_star", _NAN))
        return Reading(level, False, tag, worst.value, limit, window, pair)

    def limits(self) -> dict[str, Limits]:
        """The bands as they were for the row read last."""
        return {track.series.tag: track.limits(self._unit) for track in self.tracks}

    def _distances(self, row: Mapping[str, float]) -> list[_Distance]:
        """The series of this row whose value is known, taken into their tracks."""
        self._set_unit(row)
        spreads = {tag: window.median() for tag, window in self.spreads.items()}
        absorbing = self._absorbing(row)
        found = []
        for track in self.tracks:
            series = track.series
            value = row.get(series.tag, _NAN)
            if not math.isfinite(value) or (series.log and value <= 0):
                # Unknown. Where a finite number is owed, the rule `nonfinite` says so.
                continue
            x = math.log(value) if series.log else value
            spread = spreads[series.floor_tag] if series.floor_tag is not None else _NAN
            signed = track.distance(x, spread)
            z = {"both": abs(signed), "up": signed, "down": -signed}[series.side]
            beyond_cap = abs(value) > self._cap(track)
            left = track.take(x, z, beyond_cap)
            absorbed = absorbing and series.absorbed == ("up" if signed > 0 else "down")
            share = 0.0 if absorbed else min(max(0.0, z / series.error), series.most)
            found.append(_Distance(track, value, x, z, share, left, beyond_cap))
        return found

    def _is_beginning(self, row: Mapping[str, float]) -> bool:
        """Whether the run is young, and its gap still small. Never where the gap is unknown."""
        gap = abs(row.get("energy_gap", _NAN))
        self.count += math.isfinite(gap)
        return self.count <= self.rule.begins and gap < self.rule.begins_gap * self._unit

    @property
    def _unit(self) -> float:
        return 1.0 if self.unit is None else self.unit

    def _cap(self, track: _Track) -> float:
        has_band = len(track.window) >= self.rule.min_count
        return self._unit * min(track.series.cap, math.inf if has_band else track.series.early_cap)

    def _set_unit(self, row: Mapping[str, float]) -> None:
        """Energies of the first row set the unit of the caps; 1 for energies of order 1 to 10.

        Someone whose energies are a thousand times larger starts at thousands, not at log(10).
        """
        first = abs(row.get("f_pos/median", _NAN))
        if self.unit is None and math.isfinite(first):
            self.unit = max(1.0, first / 10)

    def _absorbing(self, row: Mapping[str, float]) -> bool:
        """Whether the weights of this row take low negatives out of the loss.

        Never for beta* <= 0, nor where one of the numbers is unknown.
        """
        overlap = row.get("energy_overlap", _NAN)
        tail = row.get("f_neg/q95", _NAN) - row.get("f_neg/min", _NAN)
        depth = row.get("beta_star", _NAN) * tail
        rule = self.rule
        return overlap >= rule.overlap_floor and overlap * depth >= rule.absorb_nats

    def _push_spreads(self, row: Mapping[str, float]) -> None:
        for tag, window in self.spreads.items():
            spread = row.get(tag, _NAN)
            if math.isfinite(spread):
                window.push(spread)

    def state_dict(self) -> dict[str, Any]:
        """All windows, oldest value first, keyed by tag."""
        return {
            "tracks": {track.series.tag: track.state_dict() for track in self.tracks},
            "spreads": {tag: window.values() for tag, window in self.spreads.items()},
            "unit": self.unit,
            "count": self.count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for track in self.tracks:
            track.load_state_dict(state["tracks"][track.series.tag])
        self.spreads = {
            tag: RollingWindow(self.rule.window, state["spreads"][tag]) for tag in self.spreads
        }
        self.unit = None if state["unit"] is None else float(state["unit"])
        self.count = int(state["count"])
