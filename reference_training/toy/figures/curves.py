"""Curves over the training, where samplers are compared: KL, and who delivers the weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...plots.canvas import COLOURS, DARK, new_figure, unframed
from ..broken import GOOD, SAMPLERS
from .runs import GOOD_WEIGHT, ToyRun
from .specs import FigureSpec
from .spread import Spread
from .words import column_title, who_draws

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.1, 5.6
TALLEST = 1e3
"""A member that diverged may end at 1e20, and would flatten all others."""


def draw_curves(spec: FigureSpec, runs: Mapping[str, ToyRun]) -> Figure:
    """KL(p_d‖p_θ) over updates, and below it the weight on the good sampler's negatives.

    One column for each β; medians over seeds with their range.

    Raises:
        ConfigError: a run lacks members that the figure shows.
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(WIDTH * len(spec.betas), HEIGHT)
    figure.set_layout_engine("constrained")
    above, below = figure.subplots(
        2, len(spec.betas), squeeze=False, sharex=True, sharey="row", height_ratios=(2, 1)
    )
    first = next(iter(runs.values()))
    for run in runs.values():
        style = _style(run, first)
        for kl, weight, beta in zip(above, below, spec.betas, strict=True):
            _draw(kl, run, beta, "kl", style)
            if len(run.samplers) > 1:
                _draw(weight, run, beta, GOOD_WEIGHT, style)
    for axes, beta in zip(above, spec.betas, strict=True):
        axes.set_title(column_title("betas", beta), fontsize=11)
        axes.set_yscale("log")
        _name_lost(axes, runs, beta)
    above[0].set_ylim(top=min(above[0].get_ylim()[1], TALLEST))
    above[0].set_ylabel(r"KL$(p_d\,\|\,p_\theta)$ (nats)")
    below[0].set_ylabel("weight on the good\n(dotted: its share)")
    below[0].set_ylim(0, 1.04)
    for axes in below:
        axes.axhline(0.5, color=DARK, lw=0.8, ls=":")  # its share of the negatives
        axes.set_xlabel("update")
    for axes in (*above, *below):
        unframed(axes)
    handles, labels = above[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"{spec.title}\nmedian and range over seeds", fontsize=11)
    return figure


def _style(run: ToyRun, first: ToyRun) -> dict[str, Any]:
    """One colour for each broken sampler; dashed where it is alone, dotted with fewer negatives."""
    worst = next((name for name in run.samplers if name != GOOD), GOOD)
    dashes = "-"
    if run.settings["n_neg"] != first.settings["n_neg"]:
        dashes = ":"
    elif GOOD not in run.samplers:
        dashes = "--"
    colour = COLOURS[list(SAMPLERS).index(worst)]
    return {"color": colour, "ls": dashes, "label": who_draws(run)}


def _draw(axes: Axes, run: ToyRun, beta: str, name: str, style: dict[str, Any]) -> None:
    indices = {member.index for member in run.of(beta, "default")}
    found: dict[int, list[float]] = {}
    for evaluation in run.evaluations:
        if evaluation["member"] in indices:
            value = float(evaluation.get(name, math.nan))
            found.setdefault(int(evaluation["step"]), []).append(value)
    spreads = [Spread.of(values) for values in found.values()]
    steps = list(found)
    axes.plot(steps, [_shown(s.median) for s in spreads], lw=1.4, **style)
    axes.fill_between(
        steps,
        [_shown(s.low) for s in spreads],
        [_shown(s.high) for s in spreads],
        color=style["color"],
        alpha=0.15,
        lw=0,
    )


def _name_lost(axes: Axes, runs: Mapping[str, ToyRun], beta: str) -> None:
    lines = []
    for run in runs.values():
        members = run.of(beta, "default")
        lost = sum(member.diverged_at is not None for member in members)
        if lost:
            lines.append(f"{lost} of {len(members)} diverged: {' + '.join(run.samplers)}")
    if not lines:
        return
    axes.text(
        0.98,
        0.02,
        "\n".join(lines),
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=8,
        color=DARK,
    )


def _shown(value: float) -> float:
    """A point that an axis can show, or none."""
    return value if math.isfinite(value) else math.nan
