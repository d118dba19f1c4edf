"""Thresholds chosen with a whole family left out, and judged on that family alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ebmguard.alerts import DEFAULT_RULES, GrowthRule, Level, Rule

from .detectors import shipped
from .judged import Recorded, Verdict, scores, verdict

__all__ = ["GRID", "chosen", "leave_one_out"]

GRID: dict[str, tuple[float, ...]] = {
    "growth": (0.6, 0.7, 0.8, 0.9, 1.1),
    "settle": (10, 20, 30),
    "lag": (5, 8, 12),
    "start": (50.0, 100.0, 200.0, 400.0),
}
"""What was tried of each threshold; without a witness growth is to be half a
unit more, and a negative gap in a start 2.5 times as large."""
_FALSE = 5.0  # what a healthy run with an ERROR costs, in dying runs found in time

Point = tuple[float, ...]


def rules_at(point: Point) -> tuple[Rule, ...]:
    """The shipped rules with these thresholds."""
    growth, settle, lag, start = point
    own = GrowthRule(
        warn=min(GrowthRule.warn, growth),
        growth=growth,
        growth_alone=growth + 0.5,
        settle=int(settle),
        lag=int(lag),
        start=start,
        start_negative=2.5 * start,
    )
    return tuple(own if isinstance(rule, GrowthRule) else rule for rule in DEFAULT_RULES)


def worth(verdicts: Iterable[Verdict]) -> float:
    """One number to choose by: shares found in time and under 5 points, less false alarms."""
    found = scores(list(verdicts))

    def share(name: str) -> float:
        count, of = found[name]
        return float(count / of) if of else 0.0

    return share("in time") + share("under 5 points") - _FALSE * share("healthy, false")


def judged_on_grid(runs: Sequence[Recorded]) -> dict[Point, list[Verdict]]:
    """Every point of the grid on every run: the rule of the blow-up alone, to choose by."""
    found = {}
    for point in itertools.product(*GRID.values()):
        rule = next(rule for rule in rules_at(point) if isinstance(rule, GrowthRule))
        found[point] = [verdict(run, onsets(run, rule)) for run in runs]
    return found


def onsets(run: Recorded, rule: Rule) -> list[int]:
    """The steps at which a rule reads ERROR and did not at the step before."""
    watcher, steps, was_lost = rule.watcher(), [], False
    for step, row in enumerate(run.rows):
        is_lost = watcher.read(row).level is Level.ERROR
        if is_lost and not was_lost:
            steps.append(step)
        was_lost = is_lost
    return steps


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
    """By family: the point chosen without it, and what all rules at that point say of it."""
    grid = judged_on_grid(runs)
    found = {}
    for family in sorted({each.run.family for each in runs}):
        point = chosen(grid, without=family)
        own = [each for each in runs if each.run.family == family]
        found[family] = point, [verdict(e, shipped(e.frame, rules_at(point))) for e in own]
    return found
