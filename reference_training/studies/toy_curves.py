"""Toy figures as curves: the trade-off at every β, and trainings where samplers are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..plots.canvas import COLOURS, DARK, new_figure, unframed
from ..toy.broken import GOOD, SAMPLERS
from .study import ABOUT
from .toy import Spec
from .toy_numbers import GOOD_WEIGHT, Rows, Spread, bands_of, heading, who_draws

TALLEST = 1e4
"""A member that diverged may end at 1e20, and would flatten all others."""


def _shown(value: float) -> float:
    """A point that a logarithmic axis can show, or none."""
    return value if math.isfinite(value) and value > 0 else math.nan


def _whisker(upper: float, lower: float) -> float:
    length = upper - lower
    return length if math.isfinite(length) else 0.0


KINDS = {
    "kl": ("-", "o", r"KL$(p_d\,\|\,p_\theta)$"),
    "kl_sgld": ("--", "s", r"KL of SGLD$(p_\theta)$"),
}


def draw_tradeoff(spec: Spec, runs: Sequence[Rows], title: str) -> Figure:
    """How far p_θ is from the data, and SGLD(p_θ): medians over seeds with their range."""
    figure = new_figure(max(5.0 * len(runs), 6.5), 4.3)
    figure.set_layout_engine("constrained")
    ordered, bands = spec.across == "beta", bands_of(spec, runs[:1])
    many = len(bands) > 1
    for axes, rows in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        # Variants have no order and no distance that an axis or a line could show.
        bands = bands_of(spec, [rows])
        places = [float(r["beta"]) if ordered else float(k) for k, r in enumerate(bands[0])]
        width = max(places) - min(places)
        for i, band in enumerate(bands):
            # The lines of one pair of axes are set apart.
            shift = 0.012 * width * (i - (len(bands) - 1) / 2)
            for k, (metric, (dashes, marker, _)) in enumerate(KINDS.items()):
                colour = COLOURS[i if many else k]
                s = [row[metric] for row in band]
                ends = [
                    [_whisker(x.median, x.low) for x in s],
                    [_whisker(x.high, x.median) for x in s],
                ]
                style = {"ms": 4.5, "lw": 1.3, "elinewidth": 0.9, "capsize": 2, "marker": marker}
                axes.errorbar(
                    [place + shift for place in places],
                    [_shown(x.median) for x in s],
                    yerr=ends,
                    color=colour,
                    ls=dashes if ordered else "",
                    mfc=colour if metric == "kl" else "white",
                    **style,
                )
        axes.set_yscale("log")
        axes.set_ylim(top=min(axes.get_ylim()[1], TALLEST))
        axes.set_xlim(min(places) - 0.06 * width, max(places) + 0.06 * width)
        axes.set_xticks(places, [heading(spec, row).removeprefix("β = ") for row in bands[0]])
        axes.set_xlabel("β" if ordered else "")
        axes.set_ylabel("KL (nats)")
        axes.set_title(rows[0][ABOUT], fontsize=10, color=DARK)
        unframed(axes)
        for place, column in zip(places, zip(*bands, strict=True), strict=True):
            words = _lost(column)
            above = {"transform": axes.get_xaxis_transform(), "rotation": 90, "color": DARK}
            axes.text(place, 0.97, words, ha="center", va="top", fontsize=9, **above)
    handles = [
        Line2D([], [], color=c, lw=4, label=band[0]["variant" if ordered else "beta"])
        for c, band in zip(COLOURS, bands, strict=False)
    ]
    kinds = [
        Line2D(
            [],
            [],
            color=DARK if many else c,
            ls=d,
            marker=m,
            ms=4.5,
            mfc=None if m == "o" else "white",
            label=n,
        )
        for c, (d, m, n) in zip(COLOURS, KINDS.values(), strict=False)
    ]
    handles = handles + kinds if many else kinds
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def _lost(rows: Sequence[dict[str, Any]]) -> str:
    lost, seeds = (sum(row[name] for row in rows) for name in ("diverged", "seeds"))
    return f"{lost} of {seeds} diverged" if lost else ""


def draw_curves(spec: Spec, runs: Sequence[Rows], title: str) -> Figure:
    """KL(p_d‖p_θ) over updates, and below it the weight on the good sampler's negatives."""
    figure = new_figure(3.1 * len(spec.betas), 5.6)
    figure.set_layout_engine("constrained")
    shared: dict[str, Any] = {"squeeze": False, "sharex": True, "sharey": "row"}
    above, below = figure.subplots(2, len(spec.betas), height_ratios=(2, 1), **shared)
    first = runs[0][0]["picture"]
    for kl, weight, rows in zip(above, below, zip(*runs, strict=True), strict=True):
        for row in rows:
            own = row["picture"]
            # One colour for each broken sampler; dashed where it is alone, dotted with fewer draws.
            worst = next((name for name in own["samplers"] if name != GOOD), GOOD)
            dashes = "--" if GOOD not in own["samplers"] else "-"
            style = {
                "color": COLOURS[list(SAMPLERS).index(worst)],
                "ls": dashes if own["n_neg"] == first["n_neg"] else ":",
                "label": who_draws(own["samplers"], own["n_neg"]),
            }
            _curve(kl, own["course"]["kl"], style)
            if len(own["samplers"]) > 1:
                _curve(weight, own["course"][GOOD_WEIGHT], style)
        kl.set_title(heading(spec, rows[0]), fontsize=11)
        kl.set_yscale("log")
        lost = [
            f"{words}: {' + '.join(r['picture']['samplers'])}"
            for r in rows
            if (words := _lost([r]))
        ]
        box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}
        where: dict[str, Any] = {"transform": kl.transAxes, "ha": "right", "va": "bottom"}
        kl.text(
            0.98, 0.02, "\n".join(lost), bbox=box if lost else None, fontsize=8, color=DARK, **where
        )
        weight.axhline(0.5, color=DARK, lw=0.8, ls=":")  # its share of the negatives
        weight.set_xlabel("update")
        unframed(kl)
        unframed(weight)
    above[0].set_ylim(top=min(above[0].get_ylim()[1], 1e3))
    above[0].set_ylabel(r"KL$(p_d\,\|\,p_\theta)$ (nats)")
    below[0].set_ylabel("weight on the good\n(dotted: its share)")
    below[0].set_ylim(0, 1.04)
    handles, labels = above[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def _curve(axes: Axes, course: dict[int, Spread], style: dict[str, Any]) -> None:
    finite = [[x if math.isfinite(x) else math.nan for x in spread] for spread in course.values()]
    median, low, high = zip(*finite, strict=True)
    axes.plot([*course], median, lw=1.4, **style)
    axes.fill_between([*course], low, high, color=style["color"], alpha=0.15, lw=0)
