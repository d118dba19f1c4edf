"""The page of results: the population, what rules find in it, and what takes runs back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from benchmarks.grid import table_of
from ebmguard.alerts import Alert

from .families import FAMILIES, LAST_FAMILIES
from .judged import BLOW_UP, Recorded, Verdict, scores
from .leave_out import GRID, Point

__all__ = ["by_family", "cause_of", "detection", "families_table"]
__all__ += ["lost_table", "taken_back_table"]

_LINES = {
    "some ERROR before death": "dying: some ERROR before death",
    "ERROR in the blow-up": f"dying: ERROR in the last {BLOW_UP} steps, before the gap passes 1e3",
    "under 5 points": "dying: the same with under 5 points lost, of those where it is possible",
    "healthy with an ERROR": "healthy: an ERROR",
    "healthy with a false ERROR": "healthy: a false ERROR",
    "false per 1,000": "healthy: false ERRORs per 1,000 steps",
    "false in all others": "dying and limping: a false ERROR",
    "steps ahead": "median steps from that ERROR to the death",
}


def _number(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "steps ahead":
        return f"{value:g}"
    count, of = value
    if name == "false per 1,000":
        return f"{count / of:.2f} ({count} in {of * 1000:,.0f})" if of else "–"
    return f"{count} of {of}"


def families_table(runs: Sequence[Recorded]) -> str:
    """What the population is, and what became of it."""
    lines = []
    for family, axes in (FAMILIES | LAST_FAMILIES | {"all": dict.fromkeys(_USUAL, "")}).items():
        own = [each for each in runs if family in (each.run.family, "all")]
        fates = Counter(each.fate.name for each in own)
        line = {"family": family, **{x: _words(axes.get(x, usual)) for x, usual in _USUAL.items()}}
        line |= {"runs": str(len(own)), "steps": f"{sum(each.fate.steps for each in own):,}"}
        lines.append(line | {name: str(fates[name]) for name in _FATES})
    return table_of(lines, 5)


_USUAL = {"data": "", "task": "jem", "network": "mlp", "sampler": "persistent"}
_FATES: tuple[Literal["dead", "limping", "healthy"], ...] = ("dead", "limping", "healthy")


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def detection(columns: Mapping[str, Sequence[Verdict]]) -> str:
    """The lines of detection, one column for each set of verdicts."""
    found = {title: scores(verdicts) for title, verdicts in columns.items()}
    return table_of(
        [
            {"": words, **{title: _number(name, own[name]) for title, own in found.items()}}
            for name, words in _LINES.items()
        ]
    )


def lost_table(columns: Mapping[str, Sequence[tuple[Recorded, bool]]]) -> str:
    """By fate, how many runs are called lost at their last row, a column for each set of runs."""
    lines = []
    for fate in _FATES:
        line = {"called lost at its last row": str(fate)}
        for title, runs in columns.items():
            own = [is_lost for each, is_lost in runs if each.fate.name == fate]
            line[title] = f"{sum(own)} of {len(own)}"
        lines.append(line)
    return table_of(lines)


def by_family(chosen: Mapping[str, tuple[Point, Sequence[Verdict]]]) -> str:
    """What thresholds that were chosen without a family find in it."""
    names = ("ERROR in the blow-up", "under 5 points", "healthy with a false ERROR", "steps ahead")
    lines = []
    for family, (point, verdicts) in chosen.items():
        found = scores(verdicts)
        line = {"left out": family, ", ".join(GRID): ", ".join(f"{value:g}" for value in point)}
        lines.append(line | {name: _number(name, found[name]) for name in names})
    return table_of(lines, 2)


def cause_of(recorded: Recorded, errors: Sequence[Alert]) -> str:
    """In what state a dying run was at the ERROR of its blow-up, or where it broke."""
    death = recorded.fate.death or 0
    last = [alert for alert in errors if death - BLOW_UP <= alert.step <= death]
    gap = last[0].value if last else float(recorded.trace["energy_gap"][death])
    is_start = not last or not last[0].window
    return f"gap {'above' if gap > 0 else 'below'} 0{', start' if is_start else ''}"


def taken_back_table(found: Sequence[Mapping[str, Any]]) -> str:
    """By cause, how many of the runs each remedy made healthy."""
    causes, lines = sorted({each["cause"] for each in found}), []
    for remedy, own in pd.DataFrame(found).groupby("remedy", sort=False):
        line = {"remedy": str(remedy)}
        for cause in (*causes, "all"):
            these = own if cause == "all" else own[own["cause"] == cause]
            line[cause] = f"{(these['fate'] == 'healthy').sum()} of {len(these)}"
        lines.append(line | {"rollbacks, median": f"{own['rollbacks'].median():g}"})
    return table_of(lines)
