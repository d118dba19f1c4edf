"""The page of results: the population, what rules find in it, and what takes runs back."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ebmguard.alerts import Alert

from .families import FAMILIES, LAST_FAMILIES
from .judged import BLOW_UP, Recorded, Verdict, scores
from .leave_out import GRID, Point

__all__ = ["by_family", "cause_of", "detection", "families_table", "taken_back_table"]

_LINES = {
    "some ERROR before death": "dying: some ERROR before death",
    "ERROR in the blow-up": f"dying: ERROR in the last {BLOW_UP} steps, before the gap passes 1e3",
    "under 5 points": "dying: the same with under 5 points lost, of those where it is possible",
    "healthy with an ERROR": "healthy: any ERROR",
    "false per 1,000": "healthy: ERRORs per 1,000 steps",
    "false in all others": "dying and limping: any ERROR that did not come true",
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


def families_table(runs: Sequence[Recorded]) -> list[str]:
    """What the population is, and what became of it."""
    lines = [
        "| family | data | task | network | sampler | runs | steps | dead | limping | healthy |",
        "|---|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    total: Counter[str] = Counter()
    for family, axes in (FAMILIES | LAST_FAMILIES).items():
        own = [each for each in runs if each.run.family == family]
        if not own:
            continue
        fates = Counter(each.fate.name for each in own)
        total += fates
        words = [_words(axes.get(name, usual)) for name, usual in _USUAL.items()]
        steps = sum(each.fate.steps for each in own)
        counts = " | ".join(str(fates[name]) for name in ("dead", "limping", "healthy"))
        lines.append(f"| {family} | {' | '.join(words)} | {len(own)} | {steps:,} | {counts} |")
    counts = " | ".join(str(total[name]) for name in ("dead", "limping", "healthy"))
    steps = sum(each.fate.steps for each in runs)
    lines.append(f"| all | | | | | {len(runs)} | {steps:,} | {counts} |")
    return lines


_USUAL = {"data": "", "task": "jem", "network": "mlp", "sampler": "persistent"}


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def detection(columns: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """The lines of detection, one column for each set of verdicts."""
    found = {name: scores(verdicts) for name, verdicts in columns.items()}
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, words in _LINES.items():
        cells = [_number(name, each[name]) for each in found.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def by_family(chosen: Mapping[str, tuple[Point, Sequence[Verdict]]]) -> list[str]:
    """What thresholds that were chosen without a family find in it."""
    names = ["ERROR in the blow-up", "under 5 points", "healthy with an ERROR"]
    lines = [
        f"| left out | {', '.join(GRID)} | {' | '.join(names)} | steps ahead |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for family, (point, verdicts) in chosen.items():
        found = scores(verdicts)
        cells = [_number(name, found[name]) for name in (*names, "steps ahead")]
        lines.append(
            f"| {family} | {_words(tuple(f'{x:g}' for x in point))} | {' | '.join(cells)} |"
        )
    return lines


def cause_of(recorded: Recorded, errors: Sequence[Alert]) -> str:
    """In what state a dying run was at the ERROR of its blow-up, or where it broke."""
    death = recorded.fate.death or 0
    last = [alert for alert in errors if death - BLOW_UP <= alert.step <= death]
    gap = last[0].value if last else float(recorded.trace["energy_gap"][death])
    is_start = not last or not last[0].window
    return f"gap {'above' if gap > 0 else 'below'} 0{', start' if is_start else ''}"


def taken_back_table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """By cause, how many of the runs each remedy made healthy."""
    remedies = list(dict.fromkeys(each["remedy"] for each in found))
    causes = sorted({each["cause"] for each in found})
    lines = [
        f"| remedy | {' | '.join(causes)} | all | rollbacks, median |",
        "|---" * (3 + len(causes)) + "|",
    ]
    for remedy in remedies:
        own = [each for each in found if each["remedy"] == remedy]
        cells = []
        for cause in (*causes, None):
            these = [each for each in own if cause in (None, each["cause"])]
            healthy = sum(each["fate"] == "healthy" for each in these)
            cells.append(f"{healthy} of {len(these)}")
        counts = [each["rollbacks"] for each in own if each["rollbacks"] is not None]
        count = statistics.median(counts) if counts else math.nan
        lines.append(f"| {remedy} | {' | '.join(cells)} | {count:g} |")
    return lines
