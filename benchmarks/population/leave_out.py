"""Numbers of the rule of blow-ups: chosen with a family left out, and each halved and doubled."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ebmguard.alerts import DEFAULT_RULES, GrowthRule

from .detectors import errors_of
from .judged import Recorded, Verdict, scores, verdict

GRID: dict[str, tuple[float, ...]] = {
    "spreads": (10, 20, 30, 60),
    "growth": (0.7, 0.9, 1.1),
    "rows": (15, 20, 30),
}
"""What is tried of the numbers that decide most."""
_FALSE = 5.0  # what a healthy run with an ERROR costs, in dying runs found in time

Point = tuple[float, ...]
NUMBERS = ("spreads", "growth", "rows", "unit", "edge", "part", "few")
RULE = next(rule for rule in DEFAULT_RULES if isinstance(rule, GrowthRule))


def judged_at(runs: Sequence[Recorded], **numbers: Any) -> list[Verdict]:
    """The rule of blow-ups alone, with other numbers, on each run."""
    rule = replace(RULE, **numbers)
    return [verdict(each, errors_of(each.rows, (rule,))) for each in runs]


def sweep(runs: Sequence[Recorded], names: Sequence[str]) -> dict[str, list[Verdict]]:
    """As shipped, and with each number halved and doubled."""
    found = {"as shipped": judged_at(runs)}
    for name in names:
        number = getattr(RULE, name)
        for factor in (0.5, 2):
            other = type(number)(factor * number)
            found[f"{name} {other:g}"] = judged_at(runs, **{name: other})
    return found


def worth(verdicts: Iterable[Verdict]) -> float:
    """One number to choose by: shares found in time and under 5 points, less false alarms."""
    found = scores(list(verdicts))

    def share(name: str) -> float:
        count, of = found[name]
        return float(count / of) if of else 0.0

    return share("in time") + share("under 5 points") - _FALSE * share("healthy, false")


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


def leave_one_out(runs: Sequence[Recorded]) -> dict[str, tuple[Point, list[Verdict]]]:
    """By family: the point chosen without it, and what the rule says of it there."""
    grid, found = dict[Point, list[Verdict]](), {}
    for point in itertools.product(*GRID.values()):
        named = zip(GRID, point, strict=True)
        grid[point] = judged_at(runs, **{x: type(getattr(RULE, x))(value) for x, value in named})
    for family in sorted({each.run.family for each in runs}):
        point = chosen(grid, without=family)
        found[family] = point, [v for v in grid[point] if v.family == family]
    return found
