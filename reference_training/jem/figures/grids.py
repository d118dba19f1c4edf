"""Figures 4 and 17 to 19: the negatives of a run of scenario 1, at one or several steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ebmguard.errors import ConfigError

from ...engine.run_folder import series
from ...plots.canvas import DARK, Canvas
from ...plots.images import load_samples, sample_grid
from ...plots.markdown import NONE, markdown_table
from ..paper import Metric
from ..runs import Evaluation, JemRun
from ..table.scores import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCENARIO = "1"
EPOCH = 107
"""Of Figure 4."""
APART = 100
"""Iterations between the two grids of Figure 17."""
MOST = 6
"""Grids in a figure of several epochs."""

# All in inches.
PANEL = 3.4
BETWEEN, CAPTION, TOP = 0.15, 0.36, 0.65
WIDEST_TITLE = 6.5

BETA_STARS = {"4": 0.5, "17": 0.0, "18": 0.5, "19": 10.0}
"""β* of each figure."""


@dataclass(frozen=True)
class Grids:
    """What a figure of samples shows.

    Attributes:
        run: the run that the samples are of.
        steps: whose negatives, ascending.
        note: what is not as in the paper; "" for nothing.
    """

    run: JemRun
    steps: tuple[int, ...]
    note: str = ""


def choose(name: str, runs: Sequence[JemRun]) -> Grids:
    """The run and the steps of a figure: the first run, published setups first, that has them.

    Raises:
        ConfigError: no run has what the figure shows.
    """
    beta_star = BETA_STARS[name]
    fitting = [r for r in runs if r.scenario == SCENARIO and r.beta_star == beta_star]
    fitting.sort(key=lambda run: (bool(run.deviations()), run.seed))
    for run in fitting:
        found = _steps(name, run)
        if found is not None:
            return found
    lack = (
        f"none of the given runs is one of scenario {SCENARIO} with β* = {beta_star:g}"
        if not fitting
        else f"{', '.join(str(run.path) for run in fitting)} stored no samples around a divergence"
        if name == "17"
        else f"{', '.join(str(run.path) for run in fitting)} stored no samples yet"
    )
    raise ConfigError(
        f"Figure {name} cannot be drawn: {lack}. A run that has them is made by `ebmguard train "
        f"jem --out DIR --data cifar10 --scenario {SCENARIO} --beta-star {beta_star:g}`"
        + (", if it diverges." if name == "17" else ".")
    )


def _steps(name: str, run: JemRun) -> Grids | None:
    stored = list(run.grids())
    # The chains start as noise, which shows nothing of the training.
    trained = [step for step in stored if step > 0]
    if name == "17":
        return _around_divergence(run, stored)
    if not trained:
        return None
    if name == "4":
        wanted = EPOCH * (run.steps_per_epoch or math.inf)
        if wanted > trained[-1]:
            return Grids(run, (trained[-1],), f"the latest; epoch {EPOCH} is not reached")
        return Grids(run, (min(trained, key=lambda step: abs(step - wanted)),))
    chosen = np.linspace(0, len(trained) - 1, min(MOST, len(trained))).round().astype(int)
    return Grids(run, tuple(trained[i] for i in chosen))


def _around_divergence(run: JemRun, stored: Sequence[int]) -> Grids | None:
    lost = run.diverged_at
    if lost is None or not any(step < lost for step in stored):
        return None
    before = max(step for step in stored if step < lost)
    later = [step for step in stored if step > before]
    if not later:
        return None
    after = min(later, key=lambda step: abs(step - before - APART))
    note = "" if after - before == APART else f"{after - before:,} iterations apart, not {APART}"
    return Grids(run, (before, after), note)


def draw_grids(grids: Grids, title: str) -> Figure:
    """The samples, one panel for each step.

    Raises:
        ImportError: matplotlib is not installed.
    """
    run, files = grids.run, grids.run.grids()
    columns = min(3, len(grids.steps))
    rows = math.ceil(len(grids.steps) / columns)
    width = columns * (PANEL + BETWEEN) + BETWEEN
    canvas = Canvas(max(width, WIDEST_TITLE), TOP + rows * (PANEL + CAPTION) + BETWEEN)
    words = [f"{run.network}, {run.config['data']}, seed {run.seed}"]
    words += ["NOT the published setup"] if run.deviations() else []
    words += [grids.note] if grids.note else []
    canvas.write(canvas.width / 2, 0.25, title, fontsize=12)
    canvas.write(canvas.width / 2, 0.52, "; ".join(words), fontsize=9, color=DARK)
    left = (canvas.width - width) / 2 + BETWEEN
    for i, step in enumerate(grids.steps):
        x = left + i % columns * (PANEL + BETWEEN)
        y = TOP + i // columns * (PANEL + CAPTION) + CAPTION
        canvas.write(x + PANEL / 2, y - CAPTION / 3, when(run, step), fontsize=10)
        axes = canvas.axes(x, y, PANEL, PANEL)
        axes.set_axis_off()
        samples = load_samples(files[step])
        zoom = max(1, 64 // samples.shape[-1])
        axes.imshow(sample_grid(samples, zoom=zoom), interpolation="nearest")
    return canvas.figure


def when(run: JemRun, step: int) -> str:
    """A step as the paper names it: epoch and iteration, each counted from 0."""
    if run.steps_per_epoch is None:
        return f"iteration {step:,}"
    epoch, iteration = divmod(step, run.steps_per_epoch)
    return f"epoch {epoch}, iteration {iteration}"


def grid_table(grids: Grids) -> str:
    """What is known of the steps: the gap, the pixels, and the latest evaluation up to each."""
    run = grids.run
    steps, values = series(run.path, ["energy_gap"])
    gaps = dict(zip(steps.tolist(), values["energy_gap"].tolist(), strict=True))
    head = ["samples", "step", "gap", "pixel mean", "pixel std", "ACC (%)", "IS", "FID"]
    rows = []
    files = run.grids()
    for step in grids.steps:
        pixels = load_samples(files[step]).double()
        tested = _latest([row for row in run.evaluations if row.test_accuracy is not None], step)
        judged = _latest([row for row in run.evaluations if row.features is not None], step)
        scores: dict[Metric, float | None] = {
            "accuracy": None if tested is None else tested.test_accuracy,
            "inception": None if judged is None else judged.inception,
            "fid": None if judged is None else judged.fid,
        }
        rows.append(
            [
                when(run, step),
                f"{step:,}",
                f"{gaps[step]:.3g}" if step in gaps else NONE,
                f"{pixels.mean():.3f}",
                f"{pixels.std(correction=0):.3f}",
                *(NONE if value is None else number(name, value) for name, value in scores.items()),
            ]
        )
    note = f"\n\n{grids.note}" if grids.note else ""
    return f"{run.path}: {run.state()}\n\n{markdown_table(head, rows)}{note}"


def _latest(rows: Sequence[Evaluation], step: int) -> Evaluation | None:
    return max((row for row in rows if row.step <= step), key=lambda row: row.step, default=None)
