"""What the seeds of one β and variant have in common: median, smallest and largest value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ...plots.numbers import number
from .runs import ToyRun


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum over seeds.

    An undefined value (NaN, of a member that diverged) is never dropped: it ranks last, so that
    the median is undefined when half of the seeds are lost.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value.

        Raises:
            ValueError: there is no value.
        """
        ranked = sorted(values, key=lambda value: (math.isnan(value), value))
        if not ranked:
            raise ValueError("a spread needs at least one value; got none")
        half = len(ranked) // 2
        middle = ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2
        return cls(median=middle, low=ranked[0], high=ranked[-1])

    def overlaps(self, other: Spread) -> bool:
        """Whether the two ranges share a value; an undefined end is worse than every number."""
        return _rank(self.low) <= _rank(other.high) and _rank(other.low) <= _rank(self.high)

    def better_than(self, other: Spread) -> bool:
        """Whether the median is the lower one; an undefined one is worse than every number."""
        return _rank(self.median) < _rank(other.median)

    @property
    def undefined(self) -> bool:
        """Whether the median is undefined: half of the seeds or more are."""
        return math.isnan(self.median)

    def __str__(self) -> str:
        if math.isnan(self.low):
            return "undefined"
        if self.low == self.high:
            return number(self.median)
        return f"{number(self.median)} [{number(self.low)}, {number(self.high)}]"


def spread(run: ToyRun, beta: str, variant: str, metric: str) -> Spread:
    """Spread of a metric over the seeds of a β and a variant.

    Raises:
        ConfigError: the run has no such members.
    """
    return Spread.of(member.metrics[metric] for member in run.of(beta, variant))


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value
