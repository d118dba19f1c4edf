"""Recorded runs judged by rules: found in time, how much was lost by then, and false alarms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ebmguard.alerts import DEFAULT_RULES, Alert, Judge, Level, Rule

from .families import Run
from .fates import LOST, Fate, fate_of, has_learned, known_skill, medians
from .record import Trace, rows_of

__all__ = ["BLOW_UP", "Recorded", "Verdict", "ends_lost", "errors_of", "load", "scores", "verdict"]

AHEAD = 100
"""Steps within which what an ERROR foretells must come."""
BLOW_UP = 50
"""Steps before a run's death that count as the blow-up itself."""
POINTS = 5.0
"""Points of skill that may be lost by an ERROR that came in time."""


@dataclass(frozen=True)
class Recorded:
    """A run with its rows and its fate."""

    run: Run
    trace: Trace
    fate: Fate

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """As the guard had them."""
        return rows_of(self.trace)

    @cached_property
    def skill(self) -> Any:
        return known_skill(self.trace["skill"])

    @cached_property
    def smooth(self) -> Any:
        return medians(self.trace["skill"])

    def lost(self, step: int) -> float:
        """Points under the median of some steps before; NaN where nothing had been learned."""
        past = self.skill[max(0, step - 60) : max(1, step - 9)]
        before = float(np.median(past))
        if not has_learned(before, self.skill[0]):
            return math.nan
        return before - float(self.skill[step])

    def comes_true(self, step: int) -> bool:
        """Whether the run broke, or lost 10 points for good, soon after an ERROR of a step."""
        death = self.fate.death
        if death is not None and death <= step + AHEAD:
            return True
        best = float(self.smooth[: step + 1].max())
        after = self.smooth[step : step + AHEAD + 1]
        return best - float(after.min()) >= LOST

    @cached_property
    def could_be_seen(self) -> bool:
        """Whether the gap was out of line in any row before 5 points were lost."""
        death = self.fate.death
        if death is None:
            return False
        gap = np.abs(self.trace["energy_gap"])
        for step in range(death - 1, max(0, death - BLOW_UP), -1):
            if self.lost(step) < POINTS:
                past = gap[max(0, step - 60) : max(1, step - 9)]
                return bool(gap[step] >= 2 * np.nanmax(past))
        return False


def load(runs: Iterable[Run], folder: Path) -> list[Recorded]:
    """Those of the runs that have been recorded."""
    found = []
    for run in runs:
        file = folder / f"{run.name}.npz"
        if file.is_file():
            with np.load(file) as archive:
                trace = {name: archive[name] for name in archive.files}
            found.append(Recorded(run, trace, fate_of(trace)))
    return found


def errors_of(recorded: Recorded, rules: Sequence[Rule] = DEFAULT_RULES) -> list[Alert]:
    """The ERRORs that rules raise on a run that is only watched."""
    judge = Judge(rules)
    alerts = [alert for i, row in enumerate(recorded.rows) for alert in judge.observe(i, row)]
    return [alert for alert in alerts if alert.level is Level.ERROR]


def ends_lost(recorded: Recorded) -> bool:
    """Whether the verdict of a run that is only watched is "lost" at its last row."""
    judge = Judge()
    for i, row in enumerate(recorded.rows):
        judge.observe(i, row)
    return judge.level is Level.ERROR


@dataclass(frozen=True)
class Verdict:
    """What ERRORs at some steps were worth on one run.

    Attributes:
        family, fate: of the run.
        any_error: of a dead one, whether any came before its death.
        in_time: whether one came in the blow-up, before |gap| was out of proportion.
        ahead: steps from the first of these to the death.
        lost: points of skill lost at the first in the blow-up; NaN where none had been won.
        is_possible: whether an ERROR that loses less than 5 points was possible.
        false: ERRORs that did not come true, by step.
        calm_steps: steps at which an ERROR would have been false.
    """

    family: str
    fate: Fate
    any_error: bool
    in_time: bool
    ahead: int | None
    lost: float
    is_possible: bool
    false: tuple[int, ...]
    calm_steps: int


def verdict(recorded: Recorded, steps: Sequence[int]) -> Verdict:
    """Of ERRORs at these steps."""
    fate, death = recorded.fate, recorded.fate.death
    until = len(recorded.skill) if death is None else death
    own = [step for step in steps if step <= until]
    false = tuple(step for step in own if not recorded.comes_true(step))
    blow_up = [] if death is None else [s for s in own if s >= death - BLOW_UP]
    first = blow_up[0] if blow_up else None
    calm = until if death is None else max(0, death - AHEAD)
    return Verdict(
        family=recorded.run.family,
        fate=fate,
        any_error=any(step < until for step in own),
        in_time=any(step < until for step in blow_up),
        ahead=until - first if first is not None else None,
        lost=math.nan if first is None else recorded.lost(first),
        is_possible=recorded.could_be_seen,
        false=false,
        calm_steps=calm,
    )


def scores(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The table's numbers: (how many, of how many)."""
    dead = [v for v in verdicts if v.fate.name == "dead"]
    healthy = [v for v in verdicts if v.fate.name == "healthy"]
    learned = [v for v in dead if v.is_possible]
    ahead = [v.ahead for v in dead if v.in_time and v.ahead is not None]
    steps = sum(v.calm_steps for v in healthy)
    return {
        "some ERROR before death": (sum(v.any_error for v in dead), len(dead)),
        "ERROR in the blow-up": (sum(v.in_time for v in dead), len(dead)),
        "under 5 points": (sum(v.in_time and v.lost < POINTS for v in learned), len(learned)),
        "healthy with an ERROR": (sum(v.any_error for v in healthy), len(healthy)),
        "healthy with a false ERROR": (sum(bool(v.false) for v in healthy), len(healthy)),
        "false per 1,000": (sum(len(v.false) for v in healthy), steps / 1000),
        "false in all others": (
            sum(bool(v.false) for v in verdicts if v.fate.name != "healthy"),
            len(verdicts) - len(healthy),
        ),
        "steps ahead": statistics.median(ahead) if ahead else None,
    }
