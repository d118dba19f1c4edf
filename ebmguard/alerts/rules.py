"""The kinds of rules, as data; :mod:`.defaults` has those that are shipped.

To change a threshold, build a changed copy: ``dataclasses.replace(rule, cooldown=500)``.

Every rule has ``calm_steps`` (observations inside its calm band that end an episode) and
``cooldown`` (observations after a report in which no new episode's WARN is reported; an ERROR is
never held back).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from . import words
from .alert import Level
from .words import Remedies

__all__ = [
    "BandRule",
    "Bound",
    "FloorRule",
    "MedianRule",
    "NonFiniteRule",
    "Rule",
    "Series",
]

Side = Literal["both", "up", "down"]


@dataclass(frozen=True)
class NonFiniteRule:
    """ERROR at once when anything is not finite.

    Attributes:
        counts: fractions or counts that must be 0; NaN is as bad as more than 0.
        numbers: diagnostics that owe a finite number whenever they are in the row.
        bounded: diagnostics where NaN means unknown, but an infinity is an alarm.
    """

    name: str = "nonfinite"
    counts: tuple[str, ...] = (
        "nonfinite/energies",
        "nonfinite/samples",
        "nonfinite/pos",
        "nonfinite/neg",
        "nonfinite/gradients",
    )
    numbers: tuple[str, ...] = ("energy_gap", "f_pos/median", "f_neg/median")
    bounded: tuple[str, ...] = ("sampler/grad_norm", "sampler/grad_norm_max")
    calm_steps: int = 20
    cooldown: int = 0
    remedies: Remedies = words.NONFINITE


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
    side: Side = "both"
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
    remedies_warn: Remedies = words.BLOWUP_WARN
    remedies_error: Remedies = words.BLOWUP_ERROR

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


@dataclass(frozen=True)
class FloorRule:
    """WARN, then ERROR, while GradScale stays under its floor.

    Steps between ``floor`` and ``clear`` neither count nor reset the count. ERROR is for
    beta* other than 0 only: there GradScale multiplies the gradient, and an adaptive optimiser
    amplifies what little is left of it (App. H). At beta* = 0 the reference exponent is read
    instead: what the weights would be, which says that negatives are not competitive but not that
    the run is lost.
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
    remedies: Remedies = words.SAMPLER

    def __post_init__(self) -> None:
        if not (self.floor <= self.clear and 1 <= self.warn_patience <= self.error_patience):
            raise ConfigError(
                f"Rule {self.name!r}: expected floor <= clear and 1 <= warn_patience <= "
                f"error_patience, but got floor={self.floor}, clear={self.clear}, "
                f"warn_patience={self.warn_patience}, error_patience={self.error_patience}."
            )


@dataclass(frozen=True)
class Bound:
    """A limit that the median of one diagnostic over a window should keep to.

    Single values of slow diagnostics are noise at ordinary batch sizes, so that one step alone
    never fires.

    Attributes:
        tag: the diagnostic.
        side: on which side of the limit the median is out of range.
        limit: exclusive.
        clear: where the median is calm again, on the other side of the limit.
        window: values in the median; there is none before so many have come.
        remedies: what helps on this side.
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
        ordered = self.clear <= self.limit if self.side == "above" else self.limit <= self.clear
        if not ordered or self.window < 1 or self.level is Level.ERROR:
            raise ConfigError(
                f"Bound of {self.tag!r}: expected clear on the other side of the limit than "
                f"{self.side!r}, window >= 1 and level INFO or WARN, but got limit={self.limit}, "
                f"clear={self.clear}, window={self.window}, level={self.level.name}."
            )


@dataclass(frozen=True)
class MedianRule:
    """WARN or INFO while a median over a window is out of bounds.

    Attributes:
        bounds: where several are broken, the first of the highest level speaks.
        reference_prefix: put before the tags at beta* = 0, where the weights are uniform and say
            nothing: what they would be at the reference exponent is read instead.
    """

    name: str
    bounds: tuple[Bound, ...]
    reference_prefix: str = ""
    calm_steps: int = 10
    cooldown: int = 500


Rule = NonFiniteRule | BandRule | FloorRule | MedianRule
