"""Figures 4 and 17 to 19: the negatives of a JEM run of scenario 1, at one or several steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ebmguard.errors import ConfigError

from ..engine.run_folder import series
from ..jem.paper import METRICS
from ..jem.runs import JemRun
from ..plots.images import load_samples
from ..plots.page import grid, show_on
from .config import JemFigure
from .jem_progress import SOURCE, opened
from .jem_tables import number
from .study import Study, frame_of

EPOCH, APART, MOST = 107, 100, 6
"""The epoch of Figure 4, iterations between the grids of Figure 17, and grids of the others."""
FIGURES = {
    "4": (0.5, "Figure 4: negatives of JEM, scenario 1, β* = 0.5"),
    "17": (0.0, "Figure 17: negatives of JEM around the divergence, scenario 1, β* = 0"),
    "18": (0.5, "Figure 18: negatives of JEM, scenario 1, β* = 0.5"),
    "19": (10.0, "Figure 19: negatives of JEM, scenario 1, β* = 10"),
}
"""β* and title of each, all of scenario 1."""


def negatives(runs: Sequence[JemRun], config: JemFigure) -> pd.DataFrame:
    """Samples at some steps of a run of scenario 1: the first that has them, published first."""
    run, steps, note = _chosen(runs, config.name)
    known, values = series(run.path, ["energy_gap"])
    gaps = dict(zip(known.tolist(), values["energy_gap"].tolist(), strict=True))
    files, rows = run.grids(), []
    for step in steps:
        images = load_samples(files[step])
        pixels = images.double()
        row = {"samples": when(run, step), "step": step, "gap": gaps.get(step)}
        row |= {"pixel mean": pixels.mean().item(), "pixel std": pixels.std(correction=0).item()}
        seen = run.evaluations[run.evaluations["step"] <= step]
        tested, judged = seen["accuracy"].dropna(), seen[seen["features"].notna()]
        for metric in METRICS:
            found = tested if metric == "accuracy" else judged[metric]
            is_known = len(found) and not math.isnan(found.iloc[-1])
            row[METRICS[metric]] = number(metric, found.iloc[-1]) if is_known else None
        rows.append({**row, "shown": images})
    frame = frame_of(rows)
    words = [f"{run.network}, {run.config['data']}, seed {run.seed}"]
    words += ["NOT the published setup"] if run.deviations() else []
    told = f"{run.path}: {run.state()}" + (f"\n\n{note}" if note else "")
    frame.attrs |= {"words": "; ".join([*words, *([note] if note else [])]), "note": told}
    return frame


def _chosen(runs: Sequence[JemRun], name: str) -> tuple[JemRun, tuple[int, ...], str]:
    beta_star, _ = FIGURES[name]
    fitting = [run for run in runs if (run.scenario, run.beta_star) == ("1", beta_star)]
    for run in sorted(fitting, key=lambda run: (bool(run.deviations()), run.seed)):
        if (found := chosen_steps(name, run)) is not None:
            return run, *found
    lack = f"none of the given runs is one of scenario 1 with β* = {beta_star:g}"
    if fitting:
        what = "samples around a divergence" if name == "17" else "samples yet"
        lack = f"{', '.join(str(run.path) for run in fitting)} stored no {what}"
    raise ConfigError(
        f"Figure {name} cannot be drawn: {lack}. A run that has them is made by `ebmguard "
        f"train jem --out DIR --data cifar10 --scenario 1 --beta-star {beta_star:g}`"
        + (", if it diverges." if name == "17" else ".")
    )


def chosen_steps(name: str, run: JemRun) -> tuple[tuple[int, ...], str] | None:
    """Whose negatives a figure shows, and what is not as in the paper; None where it has none."""
    stored = list(run.grids())
    # The chains start as noise, which shows nothing of the training.
    trained = [step for step in stored if step > 0]
    if name == "17":
        lost = -1 if run.diverged_at is None else run.diverged_at
        before = max((step for step in stored if step < lost), default=math.inf)
        later = [step for step in stored if step > before]
        if not later:
            return None
        after = min(later, key=lambda step: abs(step - before - APART))
        far = f"{after - before:,} iterations apart, not {APART}"
        return (int(before), after), "" if after - before == APART else far
    if not trained:
        return None
    if name == "4":
        wanted = EPOCH * (run.steps_per_epoch or math.inf)
        if wanted > trained[-1]:
            return (trained[-1],), f"the latest; epoch {EPOCH} is not reached"
        return (min(trained, key=lambda step: abs(step - wanted)),), ""
    places = np.linspace(0, len(trained) - 1, min(MOST, len(trained))).round().astype(int)
    return tuple(trained[i] for i in places), ""


def when(run: JemRun, step: int) -> str:
    """A step as the paper names it: epoch and iteration, each counted from 0."""
    if run.steps_per_epoch is None:
        return f"iteration {step:,}"
    return "epoch {}, iteration {}".format(*divmod(step, run.steps_per_epoch))


def draw_negatives(frame: pd.DataFrame, title: str) -> Figure:
    """The samples, one panel for each step."""
    room = {"sides": (0.15, 0.15, 0.15), "top": 1.01, "below": 0.36, "foot": -0.21, "least": 6.5}
    canvas, panels = grid(title, frame.attrs["words"], len(frame), 3, (3.4, 3.4), **room)  # type: ignore[arg-type]
    for axes, name, images in zip(panels, frame["samples"], frame["shown"], strict=True):
        axes.set_title(name, fontsize=10)
        show_on(axes, images, 8)
    return canvas.figure


_COLUMNS = "The gap of that step, and the latest evaluation up to it."
STUDIES = {
    name: Study(title, SOURCE, opened, negatives, draw_negatives, _COLUMNS)
    for name, (_, title) in FIGURES.items()
}
