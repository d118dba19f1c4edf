"""What became of a run, told by what happened and never by what a rule says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BROKEN = 1e3
"""|gap| from which a run has broken, in units of the spread of the data's energies before."""
LOST = 10.0
"""Points of skill under its best from which a run that goes on is not healthy."""
LEARNED = 20.0
"""Points of skill over the untrained network's from which a run has learned something."""
SCALE = 0.2
"""Median GradScale of the last rows under which no negative competes."""
APART = 10.0
"""Median |gap| of the last rows, in the same units, from which a run is not healthy."""
COLLAPSED = 0.01
"""Share of its largest size (|gap| or spread of f on data) under which f has become a constant."""
REACH = 0.01
"""Median share of pairs with f⁻ > f⁺ under which samples do not reach the data's energies."""

Array = NDArray[np.float32]


class Watch:
    """Says while a run goes on since when it has been broken, if it is.

    Args:
        scale: of the run's energies; the unit of the gap is at least this.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.since: int | None = None
        self._spreads: list[float] = []
        self._scale = self._unit = scale
        self._step = 0

    def take(self, gap: float, spread: float) -> int | None:
        """Of the row of the next step; the step since which |gap| has been out of all proportion.

        Out of it from :data:`BROKEN` units on, and back again under a tenth of that. The unit is
        the median standard deviation of f on data 20 to 100 steps before, at least the scale.
        """
        if self.since is None:
            if not abs(gap) < BROKEN * self._scale:  # else not of a larger unit either
                known = [x for x in self._spreads[-100:-20] if math.isfinite(x)]
                self._unit = max(self._scale, statistics.median(known)) if known else self._scale
                self.since = None if abs(gap) < BROKEN * self._unit else self._step
        elif abs(gap) < BROKEN / 10 * self._unit:
            self.since = None
        self._spreads.append(spread)
        self._step += 1
        return self.since


@dataclass(frozen=True)
class Fate:
    """One run's.

    Attributes:
        name: "dead" (|gap| went out of all proportion and did not come back), "collapsed" (it
            lived, f became a constant for its last 50 rows at least, and 10 points of skill went),
            "healthy" (it lived, learned, and ended within 10 points of its best skill with
            negatives that compete), or "limping", all else.
        death: the step at which a dead one broke, or a collapsed one's f had become a constant.
        best, last: the highest and the last median of skill over 20 rows.
        steps: rows there are.
    """

    name: Literal["dead", "collapsed", "limping", "healthy"]
    death: int | None
    best: float
    last: float
    steps: int


def known_skill(skill: Array) -> Array:
    """With 0 where it is NaN: a network without finite numbers is lost, and counts as the worst."""
    found: Array = np.nan_to_num(skill, nan=0.0)
    return found


def has_learned(skill: float, first: float) -> bool:
    """Whether a skill is well above that of the untrained network."""
    return skill - first >= min(LEARNED, (100 - first) / 2)


def medians(known: Array, width: int = 20) -> Array:
    """Of the rows up to each one, `width` of them."""
    padded = np.concatenate([np.full(width - 1, known[0]), known])
    found: Array = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
    return found


def fate_of(trace: Mapping[str, Any], least: float | None = None, scale: float = 1.0) -> Fate:
    """From its rows.

    Args:
        trace: the numbers of the rows by tag.
        least: the skill that a healthy run must have reached; None asks it of the whole run, to
            have learned something.
        scale: of its energies.
    """
    watch = Watch(scale)
    columns: Sequence[Sequence[float]] = [trace[t].tolist() for t in ("energy_gap", "f_pos/std")]
    for gap, spread in zip(*columns, strict=True):
        watch.take(gap, spread)
    smooth = medians(known_skill(trace["skill"]))
    best, last, steps = float(smooth.max()), float(smooth[-1]), len(smooth)
    if watch.since is not None:
        return Fate("dead", watch.since, best, last, steps)
    constant = constant_since(trace)
    if constant <= steps - 50 and best - last >= LOST:
        return Fate("collapsed", constant, best, last, steps)
    first = float(trace["skill"][0])
    learned = has_learned(best, first) if least is None else best >= least
    is_well = learned and best - last < LOST and negatives_compete(trace, scale)
    return Fate("healthy" if is_well else "limping", None, best, last, steps)


def constant_since(trace: Mapping[str, Any]) -> int:
    """The row from which on f was a constant up to the end; the number of rows where it is none."""
    sizes = np.fmax(np.abs(trace["energy_gap"]), trace["f_pos/std"])
    smooth = medians(np.nan_to_num(sizes, nan=np.inf))
    largest = np.maximum.accumulate(np.where(np.isfinite(smooth), smooth, 0))
    lives = np.flatnonzero(smooth >= COLLAPSED * largest)
    return int(lives[-1]) + 1 if lives.size else 0


def negatives_compete(trace: Mapping[str, Any], scale: float) -> bool:
    """Whether they did in the last 50 rows.

    At beta* > 0 GradScale tells, since stragglers have no weight; else gap and overlap do.
    """
    gap, spread, overlap, beta_star, grad_scale = (
        float(np.median(np.abs(trace[tag][-50:]))) if tag in trace else math.nan
        for tag in ("energy_gap", "f_pos/std", "energy_overlap", "beta_star", "grad_scale")
    )
    if beta_star > 0:
        return grad_scale >= SCALE
    return gap < APART * max(scale, spread) and REACH < overlap < 1 - REACH
