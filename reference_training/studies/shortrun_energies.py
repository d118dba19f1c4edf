"""f on data and on negatives during training: Figure 12 of the robust objective's Appendix L."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ebmguard import tags
from ebmguard.errors import ConfigError

from ..engine.run_folder import METRICS, series
from ..plots.canvas import COLOURS
from ..plots.page import grid, legend_above, plain
from ..shortrun.trained import TrainedRun
from .config import ShortRunFigure
from .shortrun import about, by_beta, caution, opened, ordered
from .study import ABOUT, Study, ascending, frame_of

Floats = NDArray[np.float64]

PAPERS_EVERY, LEAST_POINTS = 100, 100
"""Updates between the batches that the paper shows; fewer, where a curve had not so many points."""
WINDOWS = 50
"""Points of a curve of the gap, each the quartiles of as many updates."""
SPREAD = 20.0
"""How many times as far the widest run may spread as the narrowest, on an axis that is linear."""


def courses(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Trainings by their rows; the end of each is its last tenth."""
    if config.count is not None:
        raise ConfigError("Figure 12 draws no images and no chains; leave --count out")
    frame = frame_of([_course(label, run) for label, run in ordered(runs)])
    gaps, at_zero = by_beta(frame, "gap"), frame[frame["beta_star"] == 0]
    varies = (at_zero["high"] - at_zero["low"]).median(skipna=False)
    # Not a ratio: the gap at β* = 0 changes its sign from update to update.
    known = len(at_zero) and not varies <= 0
    frame["widening"] = pd.Series(
        [
            (row["gap"] - gaps[0]) / varies if known and row["beta_star"] else None
            for row in frame.to_dict("records")
        ],
        dtype=object,
    )
    frame.attrs |= {"note": caution(runs), "data": runs[0].data.name}
    return frame


def _course(label: str, run: TrainedRun) -> dict[str, Any]:
    file = run.path / METRICS
    if not file.is_file():
        raise ConfigError(
            f"{file} is missing: Figure 12 is drawn from the guard's rows, which `ebmguard train "
            f"shortrun` writes there"
        )
    beta_star = float(run.config.beta_star)
    weights = [tags.weight_tag(name, beta_star) for name in (tags.GRAD_SCALE, tags.ESS)]
    steps, values = series(run.path, ["f_pos/mean", "f_neg/mean", *weights])
    if not len(steps):
        raise ConfigError(f"{file} has no rows yet; wait for the run, or go on with it by --resume")
    f_pos, f_neg, grad_scale, ess = values.values()
    last = slice(-max(1, len(steps) // 10), None)
    low, gap, high = quartiles((f_pos - f_neg)[last])
    return {
        ABOUT: about(run),
        "run": label,
        "path": str(run.path),
        "seed": run.config.seed,
        "beta_star": beta_star,
        "beta": beta_star / run.settings.output_scale,
        "updates": len(steps),
        "gap": gap,
        "low": low,
        "high": high,
        "grad_scale": quartiles(grad_scale[last])[1],
        "ess": quartiles(ess[last])[1],
        "not_finite": int((~np.isfinite(f_pos - f_neg)).sum()),
        "steps": steps,
        "f_pos": f_pos,
        "f_neg": f_neg,
    }


def quartiles(values: Floats) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; NaN where a value is not finite."""
    if not np.isfinite(values).all():
        return math.nan, math.nan, math.nan
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def windows(steps: Floats, gaps: Floats) -> tuple[Floats, Floats]:
    """The gap over time: (W,) mean steps of consecutive windows, and (3, W) the quartiles there."""
    size = max(1, len(steps) // WINDOWS)
    parts = [slice(start, start + size) for start in range(0, len(steps), size)]
    return (
        np.array([steps[part].mean() for part in parts]),
        np.array([quartiles(gaps[part]) for part in parts]).T,
    )


def threshold(values: Sequence[Floats]) -> float | None:
    """Up to where a common axis is linear and beyond it logarithmic; None: all of it is linear.

    Args:
        values: what the curves show, run by run.
    """
    known = [np.abs(own[np.isfinite(own)]) for own in values]
    spreads = [size for own in known if len(own) and (size := float(np.quantile(own, 0.9))) > 0]
    if not spreads or max(spreads) <= SPREAD * min(spreads):
        return None
    return float(10.0 ** math.floor(math.log10(min(spreads))))


def draw_courses(frame: pd.DataFrame, title: str) -> Figure:
    """A panel for each run, on common axes, and one for the gaps of all."""
    rows = frame.to_dict("records")
    every = max(1, min(PAPERS_EVERY, max(len(row["steps"]) for row in rows) // LEAST_POINTS))
    words = f"means over one batch, every {every} updates" if every > 1 else "means over a batch"
    # Room for the gaps of a few runs beside their legend, below the panels.
    canvas, panels = grid(
        title,
        words,
        len(rows),
        4,
        (2.9, 2.1),
        sides=(0.85, 0.35, 0.25),
        top=1.15,
        below=0.75,
        foot=3.9,
        least=7.25,
    )
    linear = threshold([np.concatenate([row["f_pos"], row["f_neg"]]) for row in rows])
    for axes, row in zip(panels, rows, strict=True):
        shown = row["steps"] % every == 0
        for name, colour, label in zip(
            ("f_pos", "f_neg"), COLOURS, ("f(x⁺), data", "f(x⁻), negatives"), strict=False
        ):
            axes.plot(row["steps"][shown], row[name][shown], color=colour, lw=0.9, label=label)
        _finish(axes, linear, row["run"], "f")
    limits = [axes.get_ylim() for axes in panels]
    right = 1 + max(int(row["steps"][-1]) for row in rows)
    for axes in panels:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        axes.set_xlim(0, right)
        if axes.get_position().x0 > panels[0].get_position().x0:
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")
    legend_above(canvas, 0.76, panels[0].get_legend_handles_labels()[0])
    axes = canvas.axes(0.85, canvas.height - 3.75, canvas.width - 0.85 - 0.25 - 1.6, 3.0)
    gaps = [row["f_pos"] - row["f_neg"] for row in rows]
    strengths = sorted(set(frame["beta_star"]))
    lowest = 0.0
    for row, gap in zip(rows, gaps, strict=True):
        # The order of β* is that of the lightness; the lightest yellow is left out.
        place = strengths.index(row["beta_star"]) / max(1, len(strengths) - 1)
        shade = colormaps["viridis"](0.88 * place)
        steps, (low, middle, high) = windows(row["steps"], gap)
        axes.fill_between(steps, low, high, color=shade, alpha=0.2, lw=0)
        axes.plot(steps, middle, color=shade, lw=1.5, label=row["run"])
        lowest = min(lowest, float(np.nanmin([low, middle, high], initial=0.0)))
    axes.axhline(0, color="black", lw=0.6)
    linear = threshold(gaps)
    heading = "the gap: median and quartiles of consecutive updates"
    _finish(axes, linear, heading, "mean f(x⁺) − mean f(x⁻)")
    if linear is not None:
        # Where all gaps are positive, the axis would end a decade below 0.
        axes.set_ylim(bottom=lowest - linear / 2)
    axes.set_xlim(0, right)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return canvas.figure


def _finish(axes: Axes, linear: float | None, title: str, ylabel: str) -> None:
    if linear is not None:
        axes.set_yscale("symlog", linthresh=linear)
        ylabel += f"\nsymlog, linear up to ±{linear:g}"
    plain(axes, title, "update", ylabel)


STUDIES = {
    "12": Study(
        "Figure 12: f during training",
        "robust objective, Appendix L, Figure 12",
        opened,
        courses,
        draw_courses,
        "gap: mean f(x⁺) − mean f(x⁻) of a batch. It, its quartiles low and high, grad_scale and "
        "ess are medians of the last tenth of the updates; at β* = 0 the last two are those of the "
        "guard's reference. widening: by how much the gap is wider than at β* = 0, in "
        "interquartile ranges of the gap there.",
        "the gap between f(x⁺) and f(x⁻) widens with every step up of β*",
        lambda frame: ascending(by_beta(frame, "gap").tolist()),
    ),
}
