"""Which diagnostics are drawn, on which scale, and what the alert rules say of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..alerts import (
    DEFAULT_RULES,
    BandRule,
    FloorRule,
    Level,
    MedianRule,
    NonFiniteRule,
    Rule,
)
from ..alerts.band import BandWatcher

__all__ = ["ACCURACY", "CHARTS", "MORE_CHARTS", "Bands", "Chart", "Limits", "value_of"]

Scale = Literal["share", "linear", "log", "symlog"]

_INF = math.inf
_REFERENCE = "ref/"


@dataclass(frozen=True)
class Chart:
    """One diagnostic as a person reads it.

    Attributes:
        tag: the diagnostic, without the ``guard/`` prefix.
        title: its name.
        scale: "share" is linear from 0 to 1, "symlog" linear up to 1 and logarithmic beyond.
        note: what is healthy, in a few words.
    """

    tag: str
    title: str
    scale: Scale
    note: str


ACCURACY = Chart("accuracy", "test accuracy", "share", "of the evaluations")
CHARTS = (
    Chart("energy_gap", "energy gap", "symlog", "near 0 and steady; mean f⁺ − mean f⁻"),
    Chart("grad_scale", "GradScale", "share", "near 1; towards 0 no negative is competitive"),
    Chart("ess", "ESS / M", "share", "effective share of the negatives"),
    Chart("energy_overlap", "energy overlap", "share", "near 0.5; P(f⁻ > f⁺)"),
    Chart("sampler/grad_norm", "sampler gradient norm", "log", "steady; ‖∇f‖ at the last step"),
)
MORE_CHARTS = (
    Chart("f_pos/median", "f⁺, median", "symlog", "steady"),
    Chart("f_neg/median", "f⁻, median", "symlog", "steady, near that of f⁺"),
    Chart("f_neg/min", "f⁻, lowest", "symlog", "steady"),
    Chart("pareto_k", "Pareto k", "linear", "weights whose variance can be trusted are below 0.7"),
    Chart("max_weight", "largest weight", "share", "small"),
    Chart("reweighting_angle", "reweighting angle", "share", "near 1; cosine between β* and 0"),
    Chart("sampler/drift_to_noise", "SGLD drift to noise", "log", "how much a step is gradient"),
    Chart("sampler/acceptance", "Metropolis acceptance", "share", "of the last SGLD step"),
    Chart("sampler/clamped", "share at the clamp", "share", "near 0"),
    Chart("sampler/repeated", "repeated samples", "share", "0; samples of a step that came before"),
    Chart("sampler/steps_factor", "SGLD steps, factor", "linear", "1 unless they are adapted"),
    Chart("sampler/evaluations", "SGLD steps", "linear", "energy gradients spent in a step"),
    Chart("buffer/age", "age of the chains", "linear", "training steps since they began"),
    Chart("buffer/duplicates", "repeated chains", "share", "share of a draw"),
    Chart("optim/grad_norm", "gradient norm", "log", "of the parameters"),
    Chart("optim/update_norm", "update norm", "log", "of the parameters"),
    Chart("optim/amplification", "optimiser's amplification", "log", "flat"),
    Chart("nonfinite/energies", "energies not finite", "share", "0"),
    Chart("nonfinite/samples", "samples not finite", "share", "0"),
    Chart("nonfinite/gradients", "gradients not finite", "share", "0"),
    Chart("beta_star", "β*", "linear", "the exponent in use"),
)


def value_of(row: Mapping[str, float], tag: str) -> float | None:
    """A diagnostic of a row, None where the row lacks it.

    At β* = 0 the weights are uniform and say nothing; as the alert rules do, it is then read at the
    reference exponent.
    """
    if row.get("beta_star") == 0 and _REFERENCE + tag in row:
        tag = _REFERENCE + tag
    return row.get(tag)


class Limits(NamedTuple):
    """The range in which no rule says WARN, and the wider one in which none says ERROR."""

    low: float = -_INF
    high: float = _INF
    error_low: float = -_INF
    error_high: float = _INF


class Bands:
    """The limits of every diagnostic, step by step, as the detector has them.

    Fixed limits are the rules' own. A band around the run's own past is found as the detector
    finds it, from the same rows.

    Args:
        rules: the detector's.
    """

    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES) -> None:
        self.limits: dict[str, Limits] = {}
        self._watchers = []
        self._owed: set[str] = set()
        for rule in rules:
            if isinstance(rule, BandRule):
                self._watchers.append(BandWatcher(rule))
            elif isinstance(rule, FloorRule):
                self.limits[rule.tag] = Limits(low=rule.floor)
            elif isinstance(rule, MedianRule):
                for bound in rule.bounds:
                    if bound.level is Level.WARN:
                        side = "high" if bound.side == "above" else "low"
                        limits = self.limits.get(bound.tag, Limits())
                        self.limits[bound.tag] = limits._replace(**{side: bound.limit})
            elif isinstance(rule, NonFiniteRule):
                self.limits |= {tag: Limits(high=0, error_high=0) for tag in rule.counts}
                self._owed.update(rule.counts, rule.numbers)

    def owes(self, tag: str) -> bool:
        """Whether NaN is an alarm, and not just unknown."""
        return tag in self._owed

    def level(self, tag: str, value: float) -> Level | None:
        """What a value of now is worth by itself, without the rules' patience.

        NaN is worth nothing, but where a finite number is owed.
        """
        limits = self.limits.get(tag)
        if math.isnan(value):
            return Level.ERROR if self.owes(tag) else None
        if limits is None or limits.low <= value <= limits.high:
            return None
        inside = limits.error_low <= value <= limits.error_high
        return Level.WARN if inside and math.isfinite(value) else Level.ERROR

    def read(self, row: Mapping[str, float]) -> dict[str, Limits]:
        """Take the row of one step; return the limits that move, as they were for this row."""
        moving = {}
        for watcher in self._watchers:
            watcher.read(row)
            for track in watcher.tracks:
                series, cap = track.series, track.series.cap * (watcher.unit or 1.0)
                if math.isnan(track.centre):
                    limits = Limits(error_low=-cap, error_high=cap)
                else:
                    down, up = series.side != "up", series.side != "down"
                    limits = Limits(
                        track.limit(series.warn, -_INF) if down else -_INF,
                        track.limit(series.warn, _INF) if up else _INF,
                        max(-cap, track.limit(series.error, -_INF)) if down else -cap,
                        min(cap, track.limit(series.error, _INF)) if up else cap,
                    )
                moving[series.tag] = limits
        self.limits |= moving
        return moving
