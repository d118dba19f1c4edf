"""Recorded runs judged by a detector: found in time, what was lost by then, and false alarms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ebmguard.diagnostics import energy_unit
from ebmguard.tags import SAMPLER_UNIT

from .families import GROUPS, Run, group_of
from .fates import LOST, Fate, fate_of, has_learned, known_skill, medians
from .record import Trace, rows_of, unpack
from .trainer import SKILL

ROWS = Path(__file__).parent / "rows"
AHEAD = 100
"""Steps within which what an ERROR foretells must come."""
BLOW_UP = 50
"""Steps before a run's death that count as the blow-up itself."""
EARLY = 25
"""Steps within which a death leaves a detector hardly anything to compare with."""
WARNING = 2
"""Rows right before a death with a gap out of line from which it can be asked to be found."""
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
        return medians(self.skill)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """What a detector sees: a row for each step, no label, NaN where a number is not known."""
        return pd.DataFrame({tag: own for tag, own in self.trace.items() if tag != SKILL})

    def lost(self, step: int) -> float:
        """Points under the median of some steps before; NaN where nothing had been learned."""
        past = self.skill[max(0, step - 60) : max(1, step - 9)]
        before = float(np.median(past))
        if not has_learned(before, self.skill[0]):
            return math.nan
        return before - float(self.skill[step])

    def comes_true(self, step: int) -> bool:
        """Whether the run broke or collapsed, or lost 10 points, soon after an ERROR of a step."""
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
        for step in range(death - 1, max(0, death - BLOW_UP), -1):
            if self.lost(step) < POINTS:
                return self.out_of_line(step)
        return False

    def out_of_line(self, step: int) -> bool:
        """Whether |gap| is at least twice the largest of the rows 60 to 10 before."""
        gap = np.abs(self.trace["energy_gap"])
        return bool(gap[step] >= 2 * np.nanmax(gap[max(0, step - 60) : max(1, step - 9)]))

    @cached_property
    def has_warning(self) -> bool:
        """Whether each of the last rows before the death was out of line."""
        death = self.fate.death or 0
        return death >= WARNING and all(map(self.out_of_line, range(death - WARNING, death)))


def load(*groups: str, folder: Path = ROWS) -> list[Recorded]:
    """The recorded runs of groups of families; of all if none is named."""
    found = []
    for group in groups or GROUPS:
        traces = unpack(folder / file_of(group))
        for run in [run for run in group_of(group) if run.name in traces]:
            trace = traces[run.name]
            # Rows of before that number was kept.
            unit = energy_unit(step_size=run.step_size / run.scale, noise_std=run.noise_std)
            trace[SAMPLER_UNIT] = np.full(len(trace[SKILL]), unit, np.float32)
            found.append(Recorded(run, trace, fate_of(trace, scale=run.scale)))
    return found


def file_of(group: str) -> str:
    """The name of a group's file."""
    return f"{group.replace(' ', '-')}.npz"


def frame(*groups: str) -> pd.DataFrame:
    """The rows of all runs of groups, with labels: run, family, step, fate, death, skill."""
    parts = []
    for each in load(*groups):
        run, fate = each.run, each.fate
        own = each.frame.assign(run=run.name, family=run.family, step=range(fate.steps))
        parts.append(own.assign(fate=fate.name, death=fate.death, skill=each.trace[SKILL]))
    return pd.concat(parts, ignore_index=True)


@dataclass(frozen=True)
class Verdict:
    """What ERRORs at some steps were worth on one run.

    Attributes:
        family, fate: of the run.
        errors: how many came before its death, or its end.
        in_time: whether one came in the blow-up, before |gap| was out of proportion; of a collapsed
            run, whether one came from 100 steps before the collapse on.
        ahead: steps from the first of these to the death.
        lost: points of skill lost at the first in the blow-up; NaN where none had been won.
        is_possible: whether an ERROR that loses less than 5 points was possible.
        has_warning: whether the gap was out of line in the last two rows before the death.
        false: ERRORs that did not come true, by step.
        calm_steps: steps at which an ERROR would have been false.
    """

    family: str
    fate: Fate
    errors: int
    in_time: bool
    ahead: int | None
    lost: float
    is_possible: bool
    has_warning: bool
    false: tuple[int, ...]
    calm_steps: int


def verdict(recorded: Recorded, steps: Iterable[int]) -> Verdict:
    """Of ERRORs at these steps."""
    fate, end = recorded.fate, len(recorded.skill)
    until = fate.death if fate.name == "dead" and fate.death is not None else end
    own = sorted({step for step in steps if step < until})
    false = tuple(step for step in own if not recorded.comes_true(step))
    since = math.inf if fate.death is None else fate.death - _REACH[fate.name]
    found = [step for step in own if step >= since]
    first = found[0] if found else None
    return Verdict(
        family=recorded.run.family,
        fate=fate,
        errors=len(own),
        in_time=bool(found),
        ahead=until - first if first is not None else None,
        lost=math.nan if first is None else recorded.lost(first),
        is_possible=recorded.could_be_seen,
        has_warning=recorded.has_warning,
        false=false,
        calm_steps=until if fate.death is None else max(0, fate.death - AHEAD),
    )


_REACH = {"dead": BLOW_UP, "collapsed": AHEAD}


def scores(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The table's numbers: (how many, of how many)."""
    dead, collapsed, limping, healthy = (
        [v for v in verdicts if v.fate.name == fate]
        for fate in ("dead", "collapsed", "limping", "healthy")
    )
    early = [v for v in dead if (v.fate.death or 0) <= EARLY]

    def share(of: Sequence[Verdict], points: float = math.inf) -> tuple[int, int]:
        is_less = [points == math.inf or v.lost < points for v in of]
        return sum(v.in_time and less for v, less in zip(of, is_less, strict=True)), len(of)

    ahead = [v.ahead for v in dead if v.in_time and v.ahead is not None]
    return {
        "in time": share(dead),
        "of those with a warning": share([v for v in dead if v.has_warning]),
        "under 5 points": share([v for v in dead if v.is_possible], POINTS),
        "steps ahead": statistics.median(ahead) if ahead else None,
        "dead by step 25": share(early),
        "collapsed": share(collapsed),
        "healthy, false": (sum(bool(v.false) for v in healthy), len(healthy)),
        "per 1,000 steps": (
            sum(len(v.false) for v in healthy),
            sum(v.calm_steps for v in healthy) / 1000,
        ),
        "limping": (sum(v.errors for v in limping), len(limping)),
    }
