"""Figure 12: mean f on data and on negatives during training, and the gap between them, by β*."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ebmguard.errors import ConfigError

from ...plots.canvas import COLOURS, Canvas
from ...plots.figure import Made
from ...plots.markdown import markdown_table
from ...plots.numbers import counted, number
from ...plots.page import heading, legend_above, plain, tiling
from ..trained import TrainedRun
from .config import FigureConfig
from .courses import (
    Course,
    Ending,
    Floats,
    ending,
    medians,
    monotone,
    read,
    sampled,
    spacing,
    widening,
    windows,
)
from .several import caution, labels, ordered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 20.0
"""How many times as far the widest run may spread as the narrowest, on an axis that is linear."""

# All in inches.
WIDTH, HEIGHT, GAP_HEIGHT = 2.9, 2.1, 3.0
LEFT, RIGHT, TOP, BETWEEN, BELOW = 0.85, 0.25, 1.15, 0.35, 0.75
COLUMNS = 4
LEGEND = 1.6


def make(runs: Sequence[TrainedRun], config: FigureConfig) -> Made:
    """Figure 12 of the robust objective's paper.

    Raises:
        ConfigError: the runs are of several data sets, one has no rows, or a count is given.
    """
    if config.count is not None:
        raise ConfigError("Figure 12 draws no images and no chains; leave --count out")
    runs = ordered(runs)
    courses = [read(run, label) for run, label in zip(runs, labels(runs), strict=True)]
    endings = [ending(course) for course in courses]
    said = statement(courses, endings)
    words = [table(courses, endings), said, caution(runs)]
    return Made(
        figure=draw(courses, f"Figure 12: f during training, {runs[0].data.name}"),
        text="\n\n".join(filter(None, words)),
        numbers={
            "runs": [
                {
                    "path": str(run.path),
                    "seed": run.config.seed,
                    "beta_star": course.beta_star,
                    "beta": course.beta,
                    "updates": len(course.steps),
                    **vars(end),
                    "widening": widening(course, end, courses, endings),
                }
                for run, course, end in zip(runs, courses, endings, strict=True)
            ],
            "monotone": monotone(courses, endings),
            "statement": said,
        },
    )


def statement(courses: Sequence[Course], endings: Sequence[Ending]) -> str:
    """What the runs say of the paper's claim that the gap widens with β."""
    claim = "The paper: as β increases, the gap between f(x⁺) and f(x⁻) widens. "
    gaps = medians(courses, endings)
    if len(gaps) < 2:
        return claim + "One β* cannot tell."
    lost = [f"{beta_star:g}" for beta_star, gap in gaps.items() if math.isnan(gap)]
    if lost:
        return claim + f"The final gap is undefined at β* = {', '.join(lost)}."
    listed = ", ".join(f"{number(gap)} at {beta_star:g}" for beta_star, gap in gaps.items())
    narrower = [
        f"from β* = {a:g} to {b:g}"
        for (a, one), (b, two) in pairwise(gaps.items())
        if not two > one
    ]
    if not narrower:
        return claim + f"It does here at every step up: {listed}."
    return claim + f"Here it does not widen {', nor '.join(narrower)}: {listed}."


def table(courses: Sequence[Course], endings: Sequence[Ending]) -> str:
    """The ends of the trainings, a line for each run."""
    head = ["run", "β*", "β", "updates", "gap", "25%", "75%", "widening", "GradScale", "ESS"]
    rows = []
    for course, end in zip(courses, endings, strict=True):
        mark = "†" if course.beta_star == 0 else ""
        numbers = (end.gap, end.low, end.high, widening(course, end, courses, endings))
        rows.append(
            [
                course.label,
                f"{course.beta_star:g}",
                f"{course.beta:g}",
                f"{len(course.steps):,}",
                *map(number, numbers),
                *(number(value) + mark for value in (end.grad_scale, end.ess)),
                counted(end.not_finite),
            ]
        )
    lines = [
        markdown_table([*head, "not finite"], rows),
        "Gap: mean f(x⁺) − mean f(x⁻) of a batch; its median and quartiles, and the medians of "
        "GradScale and ESS, are those of the last tenth of the updates. Widening: by how much the "
        "gap is wider than at β* = 0, in interquartile ranges of the gap there.",
    ]
    if any(course.beta_star == 0 for course in courses):
        lines.append("† at β* = 0 all weights are equal; this is what the guard's reference has.")
    return "\n\n".join(lines)


def threshold(values: Sequence[Floats]) -> float | None:
    """Up to where a common axis is linear and beyond it logarithmic; None: all of it is linear.

    Args:
        values: what the curves show, run by run.
    """
    spreads = []
    for own in values:
        known = own[np.isfinite(own)]
        size = float(np.quantile(np.abs(known), 0.9)) if len(known) else 0.0
        if size > 0:
            spreads.append(size)
    if not spreads or max(spreads) <= WIDE * min(spreads):
        return None
    return float(10.0 ** math.floor(math.log10(min(spreads))))


def draw(courses: Sequence[Course], title: str) -> Figure:
    """A panel for each run, on common axes, and one for the gaps of all.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows, columns = tiling(len(courses), COLUMNS)
    # Room for the widest row of panels, and for the gaps of a few runs beside their legend.
    inside = max(columns * (WIDTH + BETWEEN) - BETWEEN, 2 * WIDTH + BETWEEN)
    below = TOP + rows * (HEIGHT + BELOW) + 0.15
    canvas = Canvas(LEFT + inside + RIGHT, below + GAP_HEIGHT + BELOW)
    every = spacing(courses)
    words = f"means over one batch, every {every} updates" if every > 1 else "means over a batch"
    heading(canvas, title, words)
    panels = []
    for i in range(len(courses)):
        x = LEFT + i % columns * (WIDTH + BETWEEN)
        y = TOP + i // columns * (HEIGHT + BELOW)
        panels.append(canvas.axes(x, y, WIDTH, HEIGHT))
    _draw_means(panels, courses, every, columns)
    legend_above(canvas, 0.76, panels[0].get_legend_handles_labels()[0])
    _draw_gaps(canvas.axes(LEFT, below, inside - LEGEND, GAP_HEIGHT), courses)
    return canvas.figure


def _draw_means(
    panels: Sequence[Axes], courses: Sequence[Course], every: int, columns: int
) -> None:
    linear = threshold([np.concatenate([course.f_pos, course.f_neg]) for course in courses])
    for axes, course in zip(panels, courses, strict=True):
        shown = sampled(course, every)
        for values, colour, label in (
            (course.f_pos, COLOURS[0], "f(x⁺), data"),
            (course.f_neg, COLOURS[1], "f(x⁻), negatives"),
        ):
            axes.plot(course.steps[shown], values[shown], color=colour, lw=0.9, label=label)
        _finish(axes, linear, course.label, "f")
    bottom = min(axes.get_ylim()[0] for axes in panels)
    top = max(axes.get_ylim()[1] for axes in panels)
    for i, axes in enumerate(panels):
        axes.set_ylim(bottom, top)
        axes.set_xlim(0, _right(courses))
        if i % columns:
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")


def _draw_gaps(axes: Axes, courses: Sequence[Course]) -> None:
    from matplotlib import colormaps

    strengths = sorted({course.beta_star for course in courses})
    linear = threshold([course.gap for course in courses])
    for course in courses:
        # The order of β* is that of the lightness; the lightest yellow is left out.
        place = strengths.index(course.beta_star) / max(1, len(strengths) - 1)
        colour = colormaps["viridis"](0.88 * place)
        steps, (low, middle, high) = windows(course)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
        axes.plot(steps, middle, color=colour, lw=1.5, label=course.label)
    axes.axhline(0, color="black", lw=0.6)
    title = "the gap: median and quartiles of consecutive updates"
    _finish(axes, linear, title, "mean f(x⁺) − mean f(x⁻)")
    if linear is not None:
        # Where all gaps are positive, the axis would end a decade below 0.
        lowest = min(float(np.nanmin(windows(c)[1], initial=0.0)) for c in courses)
        axes.set_ylim(bottom=lowest - linear / 2)
    axes.set_xlim(0, _right(courses))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)


def _finish(axes: Axes, linear: float | None, title: str, ylabel: str) -> None:
    if linear is not None:
        axes.set_yscale("symlog", linthresh=linear)
        ylabel += f"\nsymlog, linear up to ±{linear:g}"
    plain(axes, title, "update", ylabel)


def _right(courses: Sequence[Course]) -> int:
    return 1 + max(int(course.steps[-1]) for course in courses)
