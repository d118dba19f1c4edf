"""The trade-off plot: how far p_θ is from the data, and how far SGLD(p_θ), at every β."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...plots.canvas import COLOURS, DARK, new_figure, unframed
from .runs import ToyRun
from .specs import FigureSpec
from .spread import spread
from .words import VARIANT, column_title, run_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

CURVES = {
    "kl": ("-", "o", r"KL$(p_d\,\|\,p_\theta)$"),
    "kl_sgld": ("--", "s", r"KL of SGLD$(p_\theta)$"),
}
WIDTH, HEIGHT = 5.0, 4.3
ASIDE = 0.012
"""How far the lines of one pair of axes are set apart, in widths of the axes."""
TALLEST = 1e4
"""A member that diverged may end at 1e20, and would flatten all others."""


def draw_tradeoff(spec: FigureSpec, runs: Mapping[str, ToyRun]) -> Figure:
    """Medians over seeds with their range, one pair of axes for each scenario.

    KL(p_d‖p_θ), and KL from the equally blurred p_d to the kernel density estimate of SGLD(p_θ).

    Raises:
        ConfigError: a run lacks members that the figure shows.
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(max(WIDTH * len(spec.scenarios), 6.5), HEIGHT)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(spec.scenarios), squeeze=False)[0]
    for axes, scenario in zip(panels, spec.scenarios, strict=True):
        _draw_scenario(axes, spec, runs[scenario])
    figure.legend(
        handles=_legend(spec), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    figure.suptitle(f"{spec.title}\nmedian and range over seeds", fontsize=11)
    return figure


def _draw_scenario(axes: Axes, spec: FigureSpec, run: ToyRun) -> None:
    ordered = spec.across == "betas"
    # Variants have no order and no distance that an axis or a line could show.
    places = [float(c) if ordered else float(k) for k, c in enumerate(spec.columns)]
    width = max(places) - min(places)
    for i, line in enumerate(spec.lines):
        shift = ASIDE * width * (i - (len(spec.lines) - 1) / 2)
        for k, (metric, (dashes, marker, _)) in enumerate(CURVES.items()):
            colour = COLOURS[i if len(spec.lines) > 1 else k]
            spreads = [spread(run, *spec.member(line, c), metric) for c in spec.columns]
            axes.errorbar(
                [place + shift for place in places],
                [_shown(s.median) for s in spreads],
                yerr=[
                    [_whisker(s.median, s.low) for s in spreads],
                    [_whisker(s.high, s.median) for s in spreads],
                ],
                color=colour,
                ls=dashes if ordered else "",
                marker=marker,
                ms=4.5,
                mfc=colour if metric == "kl" else "white",
                lw=1.3,
                elinewidth=0.9,
                capsize=2,
            )
    axes.set_yscale("log")
    axes.set_ylim(top=min(axes.get_ylim()[1], TALLEST))
    axes.set_xlim(min(places) - 0.06 * width, max(places) + 0.06 * width)
    axes.set_xticks(
        places, [column_title(spec.across, c).removeprefix("β = ") for c in spec.columns]
    )
    if ordered:
        axes.set_xlabel("β")
    axes.set_ylabel("KL (nats)")
    axes.set_title(run_title(run), fontsize=10, color=DARK)
    unframed(axes)
    _mark_lost(axes, spec, run, places)


def _legend(spec: FigureSpec) -> list[Line2D]:
    """Colours tell variants apart where there are several, else the two curves."""
    from matplotlib.lines import Line2D

    many = len(spec.lines) > 1
    curves = [
        Line2D(
            [],
            [],
            color=DARK if many else colour,
            ls=dashes,
            marker=marker,
            ms=4.5,
            mfc=None if marker == "o" else "white",
            label=name,
        )
        for colour, (dashes, marker, name) in zip(COLOURS, CURVES.values(), strict=False)
    ]
    lines = [
        Line2D([], [], color=colour, lw=4, label=VARIANT.get(line, line))
        for colour, line in zip(COLOURS, spec.lines, strict=False)
    ]
    return lines + curves if many else curves


def _mark_lost(axes: Axes, spec: FigureSpec, run: ToyRun, places: list[float]) -> None:
    for place, column in zip(places, spec.columns, strict=True):
        members = [m for line in spec.lines for m in run.of(*spec.member(line, column))]
        lost = sum(member.diverged_at is not None for member in members)
        if lost:
            axes.text(
                place,
                0.97,
                f"{lost} of {len(members)} diverged",
                transform=axes.get_xaxis_transform(),
                rotation=90,
                ha="center",
                va="top",
                fontsize=9,
                color=DARK,
            )


def _shown(value: float) -> float:
    """A point that a logarithmic axis can show, or none."""
    return value if math.isfinite(value) and value > 0 else math.nan


def _whisker(upper: float, lower: float) -> float:
    length = upper - lower
    return length if math.isfinite(length) else 0.0
