"""The page of results: the population, what rules find in it, and what takes runs back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.grid import table
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
    by_family = {
        family: (axes, [each for each in runs if each.run.family == family])
        for family, axes in (FAMILIES | LAST_FAMILIES).items()
    }
    rows = [(family, *own) for family, own in by_family.items() if own[1]]

    def axis(name: str, usual: str) -> Any:
        return lambda x: _words(x[1].get(name, usual))

    def fates(name: str) -> Any:
        return lambda x: str(sum(each.fate.name == name for each in x[2]))

    columns = {
        "family": lambda x: x[0],
        **{name: axis(name, usual) for name, usual in _USUAL.items()},
        "runs": lambda x: str(len(x[2])),
        "steps": lambda x: f"{sum(each.fate.steps for each in x[2]):,}",
        **{name: fates(name) for name in ("dead", "limping", "healthy")},
    }
    return table([*rows, ("all", dict.fromkeys(_USUAL, ""), runs)], columns, 5)


_USUAL = {"data": "", "task": "jem", "network": "mlp", "sampler": "persistent"}


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def detection(columns: Mapping[str, Sequence[Verdict]]) -> str:
    """The lines of detection, one column for each set of verdicts."""

    def of(found: Mapping[str, Any]) -> Any:
        return lambda name: _number(name, found[name])

    made = {name: of(scores(verdicts)) for name, verdicts in columns.items()}
    return table(_LINES, {"": _LINES.__getitem__, **made})


def lost_table(columns: Mapping[str, Sequence[tuple[Recorded, bool]]]) -> str:
    """By fate, how many runs are called lost at their last row, a column for each set of runs."""

    def of(runs: Sequence[tuple[Recorded, bool]]) -> Any:
        def cell(fate: str) -> str:
            own = [is_lost for each, is_lost in runs if each.fate.name == fate]
            return f"{sum(own)} of {len(own)}"

        return cell

    made = {name: of(runs) for name, runs in columns.items()}
    return table(("dead", "limping", "healthy"), {"called lost at its last row": str, **made})


def by_family(chosen: Mapping[str, tuple[Point, Sequence[Verdict]]]) -> str:
    """What thresholds that were chosen without a family find in it."""

    def of(name: str) -> Any:
        return lambda x: _number(name, x[2][name])

    rows = [(family, point, scores(verdicts)) for family, (point, verdicts) in chosen.items()]
    names = ("ERROR in the blow-up", "under 5 points", "healthy with a false ERROR", "steps ahead")
    columns = {
        "left out": lambda x: x[0],
        ", ".join(GRID): lambda x: _words(tuple(f"{value:g}" for value in x[1])),
        **{name: of(name) for name in names},
    }
    return table(rows, columns, 2)


def cause_of(recorded: Recorded, errors: Sequence[Alert]) -> str:
    """In what state a dying run was at the ERROR of its blow-up, or where it broke."""
    death = recorded.fate.death or 0
    last = [alert for alert in errors if death - BLOW_UP <= alert.step <= death]
    gap = last[0].value if last else float(recorded.trace["energy_gap"][death])
    is_start = not last or not last[0].window
    return f"gap {'above' if gap > 0 else 'below'} 0{', start' if is_start else ''}"


def taken_back_table(found: Sequence[Mapping[str, Any]]) -> str:
    """By cause, how many of the runs each remedy made healthy."""
    frame = pd.DataFrame(found)

    def of(cause: str) -> Any:
        def cell(own: pd.DataFrame) -> str:
            these = own if cause == "all" else own[own["cause"] == cause]
            return f"{(these['fate'] == 'healthy').sum()} of {len(these)}"

        return cell

    columns = {
        "remedy": lambda own: own["remedy"].iloc[0],
        **{cause: of(cause) for cause in (*sorted(frame["cause"].unique()), "all")},
        "rollbacks, median": lambda own: f"{own['rollbacks'].median():g}",
    }
    return table((own for _, own in frame.groupby("remedy", sort=False)), columns)
