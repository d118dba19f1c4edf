"""Can a lost run be foreseen? Futures of saved states with other random numbers, and what tells.

    python -m benchmarks.foreseeing                # the runs that are not done, two at a time
    python -m benchmarks.foreseeing --table-only   # the page of what has been run

A run is saved again and again; each saved state goes on five times with other random numbers. What
is known of the state beforehand is judged by the share of its futures that are lost.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import roc_curve

from ebmguard.reference_training.plots.canvas import COLOURS, DARK, new_figure, unframed

from .foretelling import HORIZONS, LOOKS, Judged, flattened, judge
from .futures import LAST, features_of, futures, is_lost, saved
from .grid import Grid, Rows, table
from .population.families import population
from .population.trainer import Trainer

EVERY = 5
"""Steps between the states that are kept until a run's end is known."""
LEADS = (10, 25, 40, 60, 75, 90, 120, 150, 200, 300)
"""Steps before a run's end at which its states are judged."""
MEASURED = ("row/", "growth/", "probe/", "hessian_x/", "adam/")
"""Features of a state; those of settings/ show what a rule could say without looking at it."""
SEVEN = (
    "hessian_x/median", "probe/long/mean", "probe/coarse/mean", "adam/top", "row/buffer/age",
    "row/energy_gap", "row/sampler/grad_norm",
)  # fmt: skip
"""One of each kind, chosen before any was seen."""
SHOWN = 3
PICTURE = Path("docs/pictures/foreseeing.png")


# Of two families, with batches of 64 at most: the first five runs that were lost at step 150 or
# later, and the first five healthy ones, as docs/results/population.md has them; chosen before any
# feature was seen. Each healthy one is judged at the steps of the one before it.
PAIRS = {
    "digits-jem-mlp": ((0, 4, 749), (2, 6, 164), (9, 7, 277), (13, 10, 275), (14, 11, 1020)),
    "digits-noiseless": ((4, 0, 207), (7, 2, 169), (8, 3, 343), (9, 5, 532), (11, 6, 279)),
}
CELLS = {  # the shortest first
    f"{family}-{number:02d}": {"family": family, "number": number, "lives": lives, "end": end}
    for family, (*numbers, end) in sorted(
        ((family, pair) for family, pairs in PAIRS.items() for pair in pairs),
        key=lambda each: each[1][2],
    )
    for number, lives in zip(numbers, (False, True), strict=True)
}
"""A healthy run is trained no longer than the last state's future; `end` is the step at which the
run, or the one that stands before it, was lost when it was recorded."""
RUNS = {run.name: run for run in population() if run.name in CELLS}


def measure(folder: Path, lives: bool, end: int, **_: Any) -> dict[str, Any]:
    """Train a run, and judge its states."""
    began = time.process_time()
    trainer = Trainer(RUNS[folder.name])
    states, rows, died = course(trainer, end + HORIZONS[-1].within if lives else trainer.run.steps)
    trainer.guard.close()
    trained = time.process_time()
    end = end if died is None else died
    judged = []
    for step in sorted({(end - lead) // EVERY * EVERY for lead in LEADS}):
        if step not in states or step < LAST:
            continue
        features = features_of(trainer, states[step], rows[:step])
        own = died - step + 1 if died is not None and died - step < HORIZONS[-1].within else None
        deaths = futures(trainer, states[step], own)
        judged.append({"step": step, "deaths": deaths, "features": features})
        print(step, deaths, flush=True)
    return {
        "died": died,
        "steps": len(rows),
        "snapshots": judged,
        "cpu_seconds_of_run": trained - began,
        "cpu_seconds": time.process_time() - began,
    }


def course(trainer: Trainer, steps: int) -> tuple[dict[int, Any], list[dict[str, float]], Any]:
    """The states before every few steps, the rows, and the step at which the run was lost."""
    states: dict[int, Any] = {}
    rows: list[dict[str, float]] = []
    for step in range(steps):
        if step % EVERY == 0:
            states[step] = saved(trainer)
        rows.append(trainer.step())
        if is_lost(rows[-1]["energy_gap"]):
            return states, rows, step
    return states, rows, None


def by_lead(kept: pd.DataFrame) -> str:
    """How many futures with other random numbers are lost too, by how soon the run itself was."""
    dying = kept[~kept["lives"]]
    bins = pd.cut(dying["died"] - dying["step"], [0, 30, 50, 70, 100])
    others = dying["deaths"].map(lambda deaths: deaths.split()[1:])
    lost = others.map(lambda own: sum(each != "-" for each in own))
    count = others.map(len)
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
    sets = {
        "seven features together": list(SEVEN),
        "all features together": [name for name in kept if name.startswith(MEASURED)],
        **{f"`{name}`": [name] for name in kept if name.startswith((*MEASURED, "settings/"))},
    }
    judged = {
        name: [judge(kept, horizon, features) for horizon in HORIZONS]
        for name, features in sets.items()
    }
    columns: dict[str, Any] = {
        "": lambda name: name,
        **{
            f"AUC, {horizon}": lambda name, i=i: area(judged[name][i])
            for i, horizon in enumerate(HORIZONS)
        },
        "of single runs: least, median, most": lambda name: span(
            judged[name][-1].by_run().values()
        ),
        "doomed found": lambda name: "{} of {}".format(*judged[name][-1].caught()),
        "too early": lambda name: "{} of {}".format(*judged[name][-1].early()),
        "false alarms in 2,000 steps": lambda name: false_alarms(judged[name][-1]),
    }
    return table(sorted(judged, key=lambda name: -judged[name][-1].auc())[:SHOWN], columns)


def area(found: Judged) -> str:
    """The AUC and its interval."""
    low, high = found.interval()
    return f"{found.auc():.2f} ({low:.2f} to {high:.2f})"


def span(areas: Iterable[float]) -> str:
    """The smallest, the median and the largest of AUCs."""
    return ", ".join(f"{x:.2f}" for x in np.quantile([*areas], [0, 0.5, 1]))


def false_alarms(found: Judged) -> str:
    """How many there are, and what that is in 2,000 steps of healthy runs."""
    count, looks = found.false()
    return f"{LOOKS * count / looks:.1f} ({count} of {looks})"


def draw(kept: pd.DataFrame, file: Path) -> None:
    """ROC curves of each left-out run beside the healthy ones, and of all together."""
    families = dict(
        zip(dict.fromkeys(run.family for run in RUNS.values()), COLOURS[1:], strict=False)
    )
    figure = new_figure(3.4 * len(HORIZONS), 4.2)
    for i, horizon in enumerate(HORIZONS):
        axes = figure.add_subplot(1, len(HORIZONS), i + 1)
        found = judge(kept, horizon, SEVEN)
        for run in found.by_run():
            family = run.rpartition("-")[0]
            colour = families[family]
            axes.plot(*roc(found, found.of_run(run)), color=colour, linewidth=0.8, label=family)
        axes.plot(*roc(found), color=COLOURS[0], linewidth=2, label="all runs")
        axes.axvline(1 / LOOKS, color=DARK, linewidth=0.8, linestyle="--")
        ahead = " ahead" if horizon.after else ""
        axes.set(title=f"lost {horizon} steps{ahead}: {found.auc():.2f}")
        axes.set(xlabel="share of others with an alarm")
        axes.set_ylabel("" if i else "share of doomed states with an alarm")
        unframed(axes)
    labels = {text: line for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(file)


def roc(found: Judged, chosen: Any = slice(None)) -> tuple[Any, Any]:
    """The curve of some states: shares of false and of true alarms."""
    false, true, _ = roc_curve(found.doomed[chosen], found.scores[chosen])
    return false, true


def slots(rows: Rows) -> dict[str, str]:
    """Those of the page; the figure is drawn beside it."""
    kept = pd.DataFrame(line for row in rows for line in flattened(row))
    draw(kept, PICTURE)
    runs = kept.groupby("run")["lives"].first()
    counts = f"{sum(~runs)} that die and {sum(runs)} that live; {len(kept)} saved states"
    said = {"counts": counts, "leads": by_lead(kept)}
    return {**said, "verdicts": verdicts(kept)}


GRID = Grid("foreseeing", CELLS, measure, slots, trains_here=True)

if __name__ == "__main__":
    sys.exit(GRID.main())
