"""Thresholds chosen with a whole family left out, and judged on that family alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ebmguard.alerts import DEFAULT_RULES, GrowthRule, Rule

from .judged import Recorded, Verdict, errors_of, scores, verdict

__all__ = ["GRID", "chosen", "leave_one_out"]

GRID: dict[str, tuple[float, ...]] = {
    "growth": (0.5, 0.7, 0.9, 1.1),
    "settle": (10, 20, 30),
    "lag": (5, 8, 12),
    "start": (30.0, 100.0, 300.0),
}
"""What was tried of each threshold; without a witness growth is to be half a unit more."""
_FALSE = 5.0  # what a healthy run with an ERROR costs, in dying runs found in time

Point = tuple[float, ...]


def rules_at(point: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The shipped rules with these thresholds."""
    own = GrowthRule(
        growth=point["growth"],
        growth_alone=point["growth"] + 0.5,
        warn=min(0.5, point["growth"]),
        settle=int(point["settle"]),
        lag=int(point["lag"]),
        start=point["start"],
    )
    return tuple(own if isinstance(rule, GrowthRule) else rule for rule in DEFAULT_RULES)


def worth(verdicts: Iterable[Verdict]) -> float:
    """One number to choose by: shares found in time and under 5 points, less false alarms."""
    found = scores(list(verdicts))

    def share(name: str) -> float:
        count, of = found[name]
        return float(count / of) if of else 0.0

    return (
        share("ERROR in the blow-up")
        + share("under 5 points")
        - _FALSE * share("healthy with an ERROR")
    )


def judged_on_grid(runs: Sequence[Recorded]) -> dict[Point, list[Verdict]]:
    """Every point of the grid on every run. Only the blow-up's rule differs."""
    others = [rule for rule in DEFAULT_RULES if not isinstance(rule, GrowthRule)]
    rest = [{alert.step for alert in errors_of(run, others)} for run in runs]
    found = {}
    for point in itertools.product(*GRID.values()):
        rule = rules_at(dict(zip(GRID, point, strict=True)))
        own = [each for each in rule if isinstance(each, GrowthRule)]
        found[point] = [
            verdict(run, sorted(also | {alert.step for alert in errors_of(run, own)}))
            for run, also in zip(runs, rest, strict=True)
        ]
    return found


def _neighbours(point: Point) -> Iterator[Point]:
    """A point of the grid and those one step away along an axis."""
    yield point
    for axis, values in enumerate(GRID.values()):
        at = values.index(point[axis])
        for other in (at - 1, at + 1):
            if 0 <= other < len(values):
                yield (*point[:axis], values[other], *point[axis + 1 :])


def chosen(grid: Mapping[Point, Sequence[Verdict]], without: str | None = None) -> Point:
    """The point in the middle of the best plateau, on all families but one."""
    worths = {
        point: worth(v for v in verdicts if v.family != without) for point, verdicts in grid.items()
    }

    def around(point: Point) -> float:
        near = [worths[each] for each in _neighbours(point)]
        return sum(near) / len(near)

    return max(worths, key=lambda point: (around(point), worths[point]))


def leave_one_out(
    grid: Mapping[Point, Sequence[Verdict]],
) -> dict[str, tuple[Point, list[Verdict]]]:
    """By family: the point chosen without it, and the verdicts of that point on it."""
    families = sorted({v.family for v in next(iter(grid.values()))})
    found = {}
    for family in families:
        point = chosen(grid, without=family)
        found[family] = point, [v for v in grid[point] if v.family == family]
    return found
