"""How well what is known of saved states tells which are doomed, on settings that were left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneGroupOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

Array = NDArray[Any]
LOOKS = 40
"""How often a rule of the slow tier, once in 50 steps, reads 2,000 steps."""
RESAMPLES = 1000


class Horizon(NamedTuple):
    """A question: does the state lead to death in more than `after` and at most `within` steps?"""

    after: int
    within: int

    def __str__(self) -> str:
        return f"{self.after} to {self.within}" if self.after else f"within {self.within}"


HORIZONS = (Horizon(0, 50), Horizon(0, 100), Horizon(50, 100))


def share(deaths: Sequence[float | None], within: int) -> float:
    """Of the futures, those that were lost within so many steps."""
    return float(np.mean([d is not None and d <= within for d in deaths]))


def question(snapshots: pd.DataFrame, horizon: Horizon) -> tuple[pd.DataFrame, Array]:
    """The states that it is asked of, and which of them are doomed: most of their futures.

    Those that are doomed before it begins are left out.
    """
    asked = snapshots
    if horizon.after:
        asked = asked[asked[f"lost within {horizon.after}"] <= 0.5]
    return asked, (asked[f"lost within {horizon.within}"] > 0.5).to_numpy()


def readable(features: pd.DataFrame) -> Array:
    """Features on a scale on which sizes over many decades stay in order: sign · log(1 + |x|)."""
    x = features.to_numpy(float)
    x = np.where(np.isnan(x), np.nan, np.clip(x, -1e30, 1e30))
    scaled: Array = np.sign(x) * np.log1p(np.abs(x))
    return scaled


def area_under_curve(labels: Array, scores: Array) -> float:
    """Of the ROC curve: how often a true one scores higher than another; NaN without both kinds."""
    true, others = int(labels.sum()), int((~labels).sum())
    if not true or not others:
        return float("nan")
    ranks = rankdata(scores)[labels]
    return float((ranks.mean() - (true + 1) / 2) / others)


class Judged(NamedTuple):
    """Of the states asked of, each as scored by what was learned without its setting.

    Attributes:
        scores: the higher, the likelier doomed.
        alarms: whether the score passes the threshold that the other settings gave.
        doomed, runs, lives: of the states: their label, their run, and whether it is a healthy one.
    """

    scores: Array
    alarms: Array
    doomed: Array
    runs: Array
    lives: Array

    def auc(self, chosen: Array | slice = slice(None)) -> float:
        """Area under the ROC curve; NaN where there are not both kinds."""
        return area_under_curve(self.doomed[chosen], self.scores[chosen])

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """2.5th and 97.5th percentiles of the AUC over settings drawn with replacement."""
        rng = np.random.default_rng(seed)
        members = [np.flatnonzero(self.runs == run) for run in np.unique(self.runs)]
        found = [
            self.auc(
                np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
            )
            for _ in range(RESAMPLES)
        ]
        low, high = np.nanpercentile(found, [2.5, 97.5])
        return float(low), float(high)

    def of_run(self, run: str) -> Array:
        """Which states are a run's or those of healthy ones: a curve of its own."""
        found: Array = (self.runs == run) | self.lives
        return found

    def by_run(self) -> dict[str, float]:
        """The AUC of each run with doomed states."""
        return {run: self.auc(self.of_run(run)) for run in pd.unique(self.runs[self.doomed])}

    def caught(self) -> tuple[int, int]:
        """Doomed states with an alarm, of how many."""
        return int(self.alarms[self.doomed].sum()), int(self.doomed.sum())

    def false(self) -> tuple[int, int]:
        """States of healthy runs with an alarm, of how many."""
        return int(self.alarms[self.lives].sum()), int(self.lives.sum())

    def early(self) -> tuple[int, int]:
        """The same of dying runs that are not doomed yet."""
        chosen = ~self.lives & ~self.doomed
        return int(self.alarms[chosen].sum()), int(chosen.sum())


def judge(snapshots: pd.DataFrame, horizon: Horizon, features: Sequence[str]) -> Judged:
    """Score each state by features, of which everything is learned without its run.

    One feature is its own score, turned so that it is higher on the doomed ones of the other runs;
    several are those of a logistic regression. The threshold is the lowest score that at most one
    in :data:`LOOKS` of the others' states that are not doomed passes.
    """
    asked, doomed = question(snapshots, horizon)
    runs = asked["run"].to_numpy()
    x = readable(asked[list(features)])
    scores, alarms = np.zeros(len(asked)), np.zeros(len(asked), bool)
    for train, test in LeaveOneGroupOut().split(x, doomed, runs):
        model = _fitted(x[train], doomed[train])
        scores[test] = model(x[test])
        quiet = np.sort(model(x[train])[~doomed[train]])
        alarms[test] = scores[test] > quiet[-1 - len(quiet) // LOOKS]
    return Judged(scores, alarms, doomed, runs, asked["lives"].to_numpy(bool))


def _fitted(x: Array, doomed: Array) -> Any:
    if x.shape[1] == 1:
        middle = np.nanmedian(x)
        filled = np.nan_to_num(x[:, 0], nan=middle)
        sign = 1 if area_under_curve(doomed, filled) >= 0.5 else -1
        return lambda new: sign * np.nan_to_num(new[:, 0], nan=middle)
    regression = LogisticRegression(C=0.1, class_weight="balanced", max_iter=1000)
    model = make_pipeline(SimpleImputer(), StandardScaler(), regression)
    return model.fit(x, doomed).decision_function


def flattened(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each judged state of a run."""
    return [
        {
            "run": result["cell"],
            "lives": result["lives"],
            "died": result["died"],
            "step": each["step"],
            "deaths": " ".join("-" if d is None else str(d) for d in each["deaths"]),
            **{f"lost within {h}": share(each["deaths"], h) for h in (50, 100)},
            **each["features"],
        }
        for each in result["snapshots"]
    ]
