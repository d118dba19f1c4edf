"""The page of results: the population, and what rules find in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.grid import table_of

from .families import KINDS
from .judged import Recorded, Verdict, scores
from .leave_out import GRID, Point

__all__ = ["FEW", "by_family", "detection", "families_table"]


def _number(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "steps ahead":
        return f"{value:g}"
    count, of = value
    if name == "per 1,000 steps":
        return f"{count / of:.2f}" if of else "–"
    if name == "limping":
        return f"{count} in {of}"
    return f"{count} of {of}" if of else "–"


def families_table(runs: Sequence[Recorded]) -> str:
    """What the population is, and what became of it."""
    lines = []
    families = {each.run.family: KINDS[each.run.family] for each in runs}
    for family, axes in (families | {"all": dict.fromkeys(_USUAL, "")}).items():
        own = [each for each in runs if family in (each.run.family, "all")]
        fates: Counter[str] = Counter(each.fate.name for each in own)
        line = {"family": family, **{x: _words(axes.get(x, usual)) for x, usual in _USUAL.items()}}
        line |= {"runs": str(len(own)), "steps": f"{sum(each.fate.steps for each in own):,}"}
        lines.append(line | {name: str(fates[name]) for name in _FATES})
    return table_of(lines, 5)


_USUAL = {"data": "", "task": "jem", "network": "mlp", "sampler": "persistent"}
FEW = ("in time", "under 5 points", "steps ahead", "healthy, false")
_FATES = ("dead", "collapsed", "limping", "healthy")


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def detection(detectors: Mapping[str, Sequence[Verdict]], *names: str) -> str:
    """What each detector found, a line each; all scores if none is named."""
    lines = []
    for title, verdicts in detectors.items():
        found = scores(verdicts)
        line = {name: _number(name, found[name]) for name in names or found}
        lines.append({"detector": title} | line)
    return table_of(lines)


def by_family(chosen: Mapping[str, tuple[Point, Sequence[Verdict]]]) -> str:
    """What thresholds that were chosen without a family find in it."""
    lines = []
    every = {"all": ((), [v for _, verdicts in chosen.values() for v in verdicts])}
    for family, (point, verdicts) in (dict(chosen) | every).items():
        found = scores(verdicts)
        line = {"left out": family, ", ".join(GRID): ", ".join(f"{value:g}" for value in point)}
        lines.append(line | {name: _number(name, found[name]) for name in FEW})
    return table_of(lines, 2)
