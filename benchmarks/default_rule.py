"""The rule by which docs/results/defaults.md decides, from a frame of runs.

A run has a line: its setting, seed, arm and part; whether it is healthy, or lost; "buffer" and
"fresh", the distances of its samples; "gradients" of f an update; and whether it has other bits
than arm a, though it never acted ("other_bits").
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.stats import binomtest

SETTINGS, OTHERS, BITS = "settings", "networks", "discrete"
"""Parts of the study; the last one has a veto, and no more."""
STANDS_FOR = {"d": "b", "e": "c", "g": "a"}
"""Arms that are others where nothing can be finer."""
TOLERANCE, LEAST = 1.05, 5


def distances(frame: pd.DataFrame, column: str) -> tuple[pd.Series, pd.Series]:
    """By arm, as the rule has it: where arm a has healthy runs, and where it has none."""
    known = frame.assign(log=np.log(frame[column].astype(float)))
    alive = known[~known["lost"]]
    ran = known.groupby(["setting", "arm"]).size().unstack().notna()
    means = np.exp(alive.groupby(["setting", "arm"])["log"].mean().unstack())
    means = means.reindex_like(ran).fillna(math.inf).where(ran)
    healthy = alive[alive["healthy"] & (alive["arm"] == "a")].groupby("setting")["log"].mean()
    of_a = np.exp(healthy.dropna())
    return means.loc[of_a.index].div(of_a, axis=0).median(), means.drop(of_a.index).median()


def compute(frame: pd.DataFrame) -> pd.Series:
    """By arm: gradients of f an update, against arm a's in the same setting."""
    means = frame.groupby(["setting", "arm"])["gradients"].mean().unstack()
    return means.div(means.get("a"), axis=0).mean() if "a" in means else means.mean() * math.nan


def pairs(frame: pd.DataFrame, one: str, other: str) -> tuple[int, int]:
    """In how many runs one arm is healthy and another is not, and the reverse."""
    own = frame.pivot(index=["setting", "seed"], columns="arm", values="healthy")
    own = own.reindex(columns=sorted({one, other})).dropna().astype(bool)
    return int((own[one] & ~own[other]).sum()), int((~own[one] & own[other]).sum())


def is_better(frame: pd.DataFrame, one: str, other: str) -> bool:
    """Whether it is healthy more often, by the exact sign test."""
    more, less = pairs(frame, one, other)
    return more > less and bool(binomtest(more, more + less).pvalue < 0.05)


def harmed(frame: pd.DataFrame, arm: str) -> int:
    """How many runs it loses in which arm a is healthy."""
    healthy = frame[frame["healthy"] & (frame["arm"] == "a")].set_index(["setting", "seed"]).index
    lost = frame[frame["lost"] & (frame["arm"] == arm)].set_index(["setting", "seed"]).index
    return len(lost.intersection(healthy))


def shared(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that all arms of their part have."""
    arms = frame.groupby("part")["arm"].transform("nunique")
    return frame[frame.groupby(["setting", "seed"])["arm"].transform("nunique") == arms]


def chosen(frame: pd.DataFrame) -> str:
    """The arm that the rule chooses."""
    own, discrete = frame[frame["part"] != BITS], frame[frame["part"] == BITS]
    bad = (~own["healthy"]).groupby(own["arm"]).sum()
    kept = [arm for arm in bad.index if not harmed(discrete, STANDS_FOR.get(arm, arm))]
    left = bad[kept].index[bad[kept] <= bad[kept].min() + 1]
    for values in distances(own, "buffer"):
        near = values[left]  # unknown where no setting is of the kind
        left = near.index[~(near > TOLERANCE * near.min())]
    return str(compute(own)[left].idxmin())


def objections(frame: pd.DataFrame, arm: str) -> list[str]:
    """Why the rule decides nothing, if it does not."""
    own = frame[frame["part"] != BITS]
    of_a = own[own["healthy"] & (own["arm"] == "a")]
    found = {
        "it is not better than a": arm != "a" and not is_better(own, arm, "a"),
        "it loses two runs or more where a is healthy": harmed(own, arm) >= 2,
        "runs that never acted have other bits than a's": frame["other_bits"].any(),
        "too few settings have a healthy run of a": of_a["setting"].nunique() < LEAST,
    }
    for part, each in own.groupby("part"):
        better = [other for other in each["arm"].unique() if is_better(each, other, arm)]
        found[f"in {part} it is worse than {', '.join(better)}"] = bool(better)
    return [why for why, holds in found.items() if holds]
