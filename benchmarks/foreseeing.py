"""Can a lost run be foreseen? What is known of saved states, judged by their futures.

    python -m benchmarks.foreseeing   # fills the page from its rows

A run was saved again and again; each saved state went on five times with other random numbers. A
state is doomed if most of its futures are lost. The rows are kept; what trained them is
benchmarks/futures.py of commit 1b885c3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_curve
from sklearn.model_selection import LeaveOneGroupOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ebmguard.reference_training.plots.canvas import COLOURS, DARK, new_figure, unframed

from .grid import RESULTS, filled, read_rows, table, write_text

Array = NDArray[Any]
LOOKS = 40
"""How often a rule of the slow tier, once in 50 steps, reads 2,000 steps."""
RESAMPLES = 1000
MEASURED = ("row/", "growth/", "probe/", "hessian_x/", "adam/")
"""Features of a state; those of settings/ show what a rule could say without looking at it."""
SEVEN = (
    "hessian_x/median", "probe/long/mean", "probe/coarse/mean", "adam/top", "row/buffer/age",
    "row/energy_gap", "row/sampler/grad_norm",
)  # fmt: skip
"""One of each kind, chosen before any was seen."""
SHOWN = 3
PAGE, PICTURE = RESULTS / "foreseeing.md", Path("docs/pictures/foreseeing.png")


class Horizon(NamedTuple):
    """A question: does the state lead to death in more than `after` and at most `within` steps?"""

    after: int
    within: int

    def __str__(self) -> str:
        return f"{self.after} to {self.within}" if self.after else f"within {self.within}"


HORIZONS = (Horizon(0, 50), Horizon(0, 100), Horizon(50, 100))


def states(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A line for each judged state, with the share of its futures that were lost."""

    def share(deaths: Sequence[float | None], within: int) -> float:
        return float(np.mean([d is not None and d <= within for d in deaths]))

    return pd.DataFrame(
        {
            "run": row["cell"],
            "lives": row["lives"],
            "died": row["died"],
            "step": each["step"],
            "deaths": each["deaths"],
            **{f"lost within {h}": share(each["deaths"], h) for h in (50, 100)},
            **each["features"],
        }
        for row in rows
        for each in row["snapshots"]
    )


def asked(kept: pd.DataFrame, horizon: Horizon) -> pd.DataFrame:
    """The states that a question is asked of: those that are doomed before it begins are out."""
    if horizon.after:
        kept = kept[kept[f"lost within {horizon.after}"] <= 0.5]
    return kept.assign(doomed=kept[f"lost within {horizon.within}"] > 0.5)


def area_under_curve(doomed: Array, scores: Array) -> float:
    """Of the ROC curve: how often a doomed one scores higher; NaN without both kinds."""
    true, others = int(doomed.sum()), int((~doomed).sum())
    if not true or not others:
        return float("nan")
    return float((rankdata(scores)[doomed].mean() - (true + 1) / 2) / others)


def auc(judged: pd.DataFrame) -> float:
    """Of judged states."""
    return area_under_curve(judged["doomed"].to_numpy(), judged["score"].to_numpy())


def interval(judged: pd.DataFrame) -> tuple[float, float]:
    """2.5th and 97.5th percentiles of the AUC over runs drawn with replacement."""
    rng, found = np.random.default_rng(0), []
    doomed, scores, runs = (judged[x].to_numpy() for x in ("doomed", "score", "run"))
    members = [np.flatnonzero(runs == run) for run in np.unique(runs)]
    for _ in range(RESAMPLES):
        drawn = [members[i] for i in rng.integers(len(members), size=len(members))]
        own = np.concatenate(drawn)
        found.append(area_under_curve(doomed[own], scores[own]))
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return float(low), float(high)


def by_run(judged: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Of each run with doomed states: its states and those of the healthy ones."""
    runs = judged.loc[judged["doomed"], "run"].unique()
    return {run: judged[(judged["run"] == run) | judged["lives"]] for run in runs}


def alarms(judged: pd.DataFrame, chosen: pd.Series[bool]) -> tuple[int, int]:
    """Alarms among chosen states, of how many."""
    return int(judged.loc[chosen, "alarm"].sum()), int(chosen.sum())


def false(judged: pd.DataFrame) -> tuple[int, int]:
    """Of states of healthy runs."""
    return alarms(judged, judged["lives"])


def caught(judged: pd.DataFrame) -> tuple[int, int]:
    """Of doomed states."""
    return alarms(judged, judged["doomed"])


def judge(kept: pd.DataFrame, horizon: Horizon, features: Sequence[str]) -> pd.DataFrame:
    """Score each state by features, of which everything is learned without its run.

    One feature is its own score, turned so that it is higher on the doomed ones of the other runs;
    several are those of a logistic regression. There is an alarm above the lowest score that at
    most one in :data:`LOOKS` of the other runs' states that are not doomed passes.
    """
    found = asked(kept, horizon)
    x = found[list(features)].to_numpy(float).clip(-1e30, 1e30)
    x, doomed = np.sign(x) * np.log1p(np.abs(x)), found["doomed"].to_numpy()
    scores, alarm = np.zeros(len(x)), np.zeros(len(x), bool)
    for train, test in LeaveOneGroupOut().split(x, doomed, found["run"]):
        model = _fitted(x[train], doomed[train])
        scores[test] = model(x[test])
        quiet = np.sort(model(x[train])[~doomed[train]])
        alarm[test] = scores[test] > quiet[-1 - len(quiet) // LOOKS]
    return found.assign(score=scores, alarm=alarm)


def _fitted(x: Array, doomed: Array) -> Any:
    if x.shape[1] == 1:
        middle = np.nanmedian(x)
        sign = 1 if area_under_curve(doomed, np.nan_to_num(x[:, 0], nan=middle)) >= 0.5 else -1
        return lambda new: sign * np.nan_to_num(new[:, 0], nan=middle)
    regression = LogisticRegression(C=0.1, class_weight="balanced", max_iter=1000)
    model = make_pipeline(SimpleImputer(), StandardScaler(), regression)
    return model.fit(x, doomed).decision_function


def by_lead(kept: pd.DataFrame) -> str:
    """How many futures with other random numbers are lost too, by how soon the run itself was."""
    dying = kept[~kept["lives"]]
    bins = pd.cut(dying["died"] - dying["step"], [0, 30, 50, 70, 100])
    lost = dying["deaths"].map(lambda deaths: sum(each is not None for each in deaths[1:]))
    count = dying["deaths"].map(len) - 1
    columns: dict[str, Any] = {
        "steps to the run's own end": lambda at: f"{at.left:.0f} to {at.right:.0f}",
        "states": lambda at: str((bins == at).sum()),
        "other futures lost within 100 steps": lambda at: (
            f"{lost[bins == at].sum()} of {count[bins == at].sum()}"
        ),
        "states where all are": lambda at: str((lost == count)[bins == at].sum()),
        "states where none is": lambda at: str((lost == 0)[bins == at].sum()),
    }
    return table(bins.cat.categories, columns)


def verdicts(kept: pd.DataFrame) -> str:
    """A line for each of the best features, by AUC at the last horizon."""
    sets = {"seven features together": list(SEVEN)}
    sets["all features together"] = [name for name in kept if name.startswith(MEASURED)]
    sets |= {f"`{name}`": [name] for name in kept if name.startswith((*MEASURED, "settings/"))}
    last = {name: judge(kept, HORIZONS[-1], features) for name, features in sets.items()}
    columns: dict[str, Any] = {"": lambda name: name}
    columns |= {
        f"AUC, {horizon}": lambda name, at=horizon: area(judge(kept, at, sets[name]))
        for horizon in HORIZONS
    }
    columns |= {
        "of single runs: least, median, most": lambda name: ", ".join(
            f"{x:.2f}" for x in np.quantile([*map(auc, by_run(last[name]).values())], [0, 0.5, 1])
        ),
        "doomed found": lambda name: "{} of {}".format(*caught(last[name])),
        "too early": lambda name: "{} of {}".format(
            *alarms(last[name], ~last[name]["lives"] & ~last[name]["doomed"])
        ),
        "false alarms in 2,000 steps": lambda name: false_alarms(last[name]),
    }
    return table(sorted(sets, key=lambda name: -auc(last[name]))[:SHOWN], columns)


def area(judged: pd.DataFrame) -> str:
    """The AUC and its interval."""
    low, high = interval(judged)
    return f"{auc(judged):.2f} ({low:.2f} to {high:.2f})"


def false_alarms(judged: pd.DataFrame) -> str:
    """How many there are, and what that is in 2,000 steps of healthy runs."""
    count, looks = false(judged)
    return f"{LOOKS * count / looks:.1f} ({count} of {looks})"


def draw(kept: pd.DataFrame, file: Path) -> None:
    """ROC curves of each left-out run beside the healthy ones, and of all together."""
    families = kept["run"].str.rpartition("-")[0].unique()
    colours = dict(zip(sorted(families), COLOURS[1:], strict=False))
    figure = new_figure(3.4 * len(HORIZONS), 4.2)
    for i, horizon in enumerate(HORIZONS):
        axes, found = figure.add_subplot(1, len(HORIZONS), i + 1), judge(kept, horizon, SEVEN)
        for run, own in by_run(found).items():
            family = run.rpartition("-")[0]
            curve = roc_curve(own["doomed"], own["score"])[:2]
            axes.plot(*curve, color=colours[family], linewidth=0.8, label=family)
        curve = roc_curve(found["doomed"], found["score"])[:2]
        axes.plot(*curve, color=COLOURS[0], linewidth=2, label="all runs")
        axes.axvline(1 / LOOKS, color=DARK, linewidth=0.8, linestyle="--")
        ahead = " ahead" if horizon.after else ""
        axes.set(title=f"lost {horizon} steps{ahead}: {auc(found):.2f}")
        axes.set(xlabel="share of others with an alarm")
        axes.set_ylabel("" if i else "share of doomed states with an alarm")
        unframed(axes)
    labels = {text: line for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(file)


def main() -> None:
    """Fill the page, and draw its figure."""
    kept = states(read_rows(PAGE.with_suffix(".csv.gz")))
    draw(kept, PICTURE)
    lives = kept.groupby("run")["lives"].first()
    counts = f"{sum(~lives)} that die and {sum(lives)} that live; {len(kept)} saved states"
    slots = {"counts": counts, "leads": by_lead(kept), "verdicts": verdicts(kept)}
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8"), slots, whole=False))


if __name__ == "__main__":
    main()
