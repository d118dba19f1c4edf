"""The toy figures as pictures: densities in the paper's layout, the trade-off, and trainings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..plots.canvas import COLOURS, DARK, constrained, legend_below, new_figure, plain, unframed
from ..plots.numbers import number
from ..toy.scenario import GOOD, SAMPLERS
from .study import ABOUT, Study
from .toy import CLAIMS, DATA, FIGURES, Spec, members, opened, who_draws

Rows = list[dict[str, Any]]
ROWS = ("density", "log density")
LABELS = {"truth": "truth", "learned": r"$p_\theta$", "sampled": r"SGLD$(p_\theta)$"}
KINDS = {"kl": (r"KL$(p_d\,\|\,p_\theta)$", "-o"), "kl_sgld": (f"KL of {LABELS['sampled']}", "--s")}
NOTE = (
    "Densities of seed 0; log density is log(density + 1e-10).\n"
    r"Below $p_\theta$: KL$(p_d\,\|\,p_\theta)$ in nats and total variation. "
    r"Below the kernel density estimate of SGLD$(p_\theta)$: the same, both blurred alike."
)
STYLE: dict[str, Any] = {"ms": 4.5, "lw": 1.3, "elinewidth": 0.9, "capsize": 2}


def draw_toy(frame: pd.DataFrame, title: str) -> dict[str, Figure]:
    """The densities, in one picture or one for each scenario, and how far they are off."""
    spec, name = FIGURES[frame.attrs["spec"]], f"figure_{frame.attrs['spec']}"
    parts = {name: (frame, title)}
    if spec.split:
        scenarios = frame.groupby("scenario", sort=False)
        data = {str(s).partition("-")[0]: own for s, own in scenarios}
        parts = {f"{name}_{d}": (own, f"{title}, {DATA[d]}") for d, own in data.items()}
    draw = _images if frame["picture"][0]["truth"][0][0].ndim == 2 else _lines
    drawn = {key: draw(spec, _bands(spec, own), words) for key, (own, words) in parts.items()}
    words = f"{title}\nmedian and range over seeds"
    if spec.has_mixtures:
        return drawn | {"curves": draw_curves(spec, frame, words)}
    return drawn | {"tradeoff": draw_tradeoff(spec, frame, words)}


def _bands(spec: Spec, frame: pd.DataFrame) -> list[Rows]:
    """The rows of each band in the order of the columns."""
    groups = frame.groupby(["scenario", spec.down], sort=False)
    return [own.to_dict("records") for _, own in groups]


def _heading(spec: Spec, row: dict[str, Any]) -> str:
    """What stands above a column of a figure: its β, or its variant."""
    return str(row["variant"]) if spec.down == "beta" else f"β = {row['beta']}"


def _images(spec: Spec, bands: Sequence[Rows], title: str) -> Figure:
    """Densities on (n, n) grids; y grows downward, as in the paper."""
    pairs, rows = len(bands[0]), 2 * len(bands)
    # Narrow columns without axes part the pairs.
    widths, names = (1, *(0.1, 1, 1) * pairs), ("truth", *("learned", "sampled") * pairs)
    wide, high = 1.27 * sum(widths) + 0.84, 1.56 * rows + 1.45
    figure = new_figure(wide, high)
    room = {"left": 0.74 / wide, "right": 1 - 0.1 / wide, "top": 1 - 0.98 / high}
    room |= {"bottom": 0.8 / high, "wspace": 0.07, "hspace": 0.29}
    panels = figure.subplots(rows, len(widths), width_ratios=widths, gridspec_kw=room)
    for axes in panels[:, 1::3].flat:
        axes.remove()
    figure.suptitle(title, fontsize=12, x=0.74 / wide, y=1 - 0.22 / high, ha="left", va="center")
    note = NOTE.replace("0;", "0, each on its own colour scale;")
    figure.text(0.74 / wide, 0.1 / high, note, fontsize=8, color=DARK)
    centred: dict[str, Any] = {"ha": "center", "va": "center"}
    for i, row in enumerate(np.delete(panels, np.s_[1::3], axis=1)):
        band, log = bands[i // 2], i % 2
        row[0].set_ylabel(ROWS[log], fontsize=9)
        for j, (axes, name) in enumerate(zip(row, names, strict=True)):
            _image(axes, band[max(0, j - 1) // 2]["picture"], name, log)
            if i == 0:
                axes.set_title(LABELS[name], fontsize=10)
        if not log:
            style = {"fontsize": 11, "weight": "bold", "rotation": 90, **centred}
            _beside(row[0], -0.43, -0.15, band[0]["picture"]["band"], **style)
    for axes, row in zip(panels[0, 2::3], bands[0], strict=True):
        _beside(axes, 1.03, 1.37, _heading(spec, row), fontsize=12, **centred)
        ends: dict[str, Any] = {"xycoords": "axes fraction", "arrowprops": {"arrowstyle": "-"}}
        axes.annotate("", (0, 1.24), (2.06, 1.24), **ends)
    return figure


def _beside(axes: Axes, x: float, y: float, words: str, **style: Any) -> None:
    """Words at a place in shares of the panel, which may lie outside of it."""
    axes.text(x, y, words, transform=axes.transAxes, **style)


def _image(axes: Axes, picture: dict[str, Any], name: str, log: int) -> None:
    image, words = picture[name][log]
    axes.set(xticks=[], yticks=[], box_aspect=1)
    axes.spines[:].set_linewidth(0.4)
    axes.set_xlabel(words, fontsize=7.5, labelpad=2)
    if image is None:
        axes.set_facecolor("#E6E6E6")
        _beside(
            axes, 0.5, 0.5, picture["instead"], fontsize=9, color=DARK, ha="center", va="center"
        )
    else:
        # Each panel has its own scale, as in the paper: beside a density that is far too sharp all
        # others would be black.
        axes.imshow(image, cmap="viridis", origin="upper", aspect="auto")


def _lines(spec: Spec, bands: Sequence[Rows], title: str) -> Figure:
    """Densities on (n,) grids as lines: truth, p_θ and the estimate of SGLD(p_θ)."""
    (band,) = bands
    figure, panels = constrained(title, (2, len(band)), (2.95 * len(band) + 0.5, 6.7))
    styles: dict[str, dict[str, Any]] = {
        "truth": {"color": "black", "lw": 2.2, "alpha": 0.45},
        "learned": {"color": COLOURS[1], "lw": 1.3},
        "sampled": {"color": COLOURS[0], "lw": 1.3, "ls": "--"},
    }
    for i, axes in enumerate(panels.flat):
        log, k = divmod(i, len(band))
        picture, words = band[k]["picture"], []
        for name, label in LABELS.items():
            curve, below = picture[name][log]
            curve = np.full_like(picture["axis"], np.nan) if curve is None else curve
            axes.plot(picture["axis"], curve, label=label, **styles[name])
            words += [f"{label}: {', '.join(below.splitlines())}"] if below else []
        plain(axes, _heading(spec, band[k]) * (not log), "\n".join(words), ROWS[log] * (not k))
        axes.set_xlim(*picture["axis"][[0, -1]])
        top, learned = 2.5 * picture["truth"][0][0].max(), picture["learned"][0][0]
        if not log:  # p_θ may be many times as sharp
            axes.set_ylim(0, top)
            if learned is not None and learned.max() > top:
                note = f"{LABELS['learned']} reaches {number(float(learned.max()), 2)}"
                _beside(axes, 0.98, 0.96, note, ha="right", va="top")
    panels[0, -1].legend(loc="upper left", frameon=False, fontsize=9)
    figure.supxlabel(NOTE, fontsize=8, color=DARK)
    return figure


def draw_tradeoff(spec: Spec, frame: pd.DataFrame, title: str) -> Figure:
    """How far p_θ is from the data, and SGLD(p_θ): medians over seeds with their range."""
    runs = [_bands(spec, own) for _, own in frame.groupby("scenario", sort=False)]
    ordered, many = spec.down == "variant", len(runs[0]) > 1
    size = (max(5.0 * len(runs), 10.0 if many else 6.5), 4.3)
    figure, panels = constrained(title, (1, len(runs)), size)
    for axes, bands in zip(panels[0], runs, strict=True):
        # Variants have no order and no distance that an axis or a line could show.
        places = np.array([float(r["beta"]) if ordered else k for k, r in enumerate(bands[0])])
        width = np.ptp(places)
        for i, band in enumerate(bands):
            for k, (metric, (label, form)) in enumerate(KINDS.items()):
                spreads = np.array([row[metric] for row in band])
                # No point, and no whisker, where a logarithmic axis could not show it.
                shown = (spreads > 0) & np.isfinite(spreads)
                middle, low, high = np.where(shown, spreads, np.nan).T
                colour = COLOURS[i if many else k]
                axes.errorbar(
                    # The lines of one pair of axes are set apart.
                    places + 0.012 * width * (i - (len(bands) - 1) / 2),
                    middle,
                    yerr=np.nan_to_num([middle - low, high - middle]),
                    fmt=form if ordered else form[-1],
                    color=colour,
                    mfc="white" if k else colour,
                    label=f"{band[0][spec.down]}: {label}" if many else label,
                    **STYLE,
                )
        axes.set_yscale("log")
        # A member that diverged may end at 1e20, and would flatten all others.
        axes.set_ylim(top=min(axes.get_ylim()[1], 1e4))
        axes.set_xlim(places[0] - 0.06 * width, places[-1] + 0.06 * width)
        axes.set_xticks(places, [_heading(spec, row).removeprefix("β = ") for row in bands[0]])
        plain(axes, bands[0][0][ABOUT], "β" * ordered, "KL (nats)")
        style: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 9, "rotation": 90}
        for place, column in zip(places, zip(*bands, strict=True), strict=True):
            axes.text(place, 0.97, _lost(column), transform=axes.get_xaxis_transform(), **style)
    legend_below(figure, figure.axes[0])
    return figure


def _lost(rows: Sequence[dict[str, Any]]) -> str:
    lost, seeds = (sum(row[name] for row in rows) for name in ("diverged", "seeds"))
    return f"{lost} of {seeds} diverged" if lost else ""


def draw_curves(spec: Spec, frame: pd.DataFrame, title: str) -> Figure:
    """KL(p_d‖p_θ) over updates, and below it the weight on the good sampler's negatives."""
    columns = len(spec.betas)
    shared: dict[str, Any] = {"height_ratios": (2, 1), "sharex": True, "sharey": "row"}
    figure, (above, below) = constrained(title, (2, columns), (3.1 * columns, 5.6), **shared)
    few = frame["picture"].iloc[0]["settings"]["n_neg"]
    for kl, weight, rows in zip(above, below, zip(*_bands(spec, frame), strict=True), strict=True):
        lost = []
        for row in rows:
            who, n_neg = (row["picture"]["settings"][name] for name in ("samplers", "n_neg"))
            names = who.split("+")
            # One colour for each broken sampler; dashed where it is alone, dotted with fewer draws.
            worst = next((name for name in names if name != GOOD), GOOD)
            style: dict[str, Any] = {
                "color": COLOURS[list(SAMPLERS).index(worst)],
                "ls": ":" if n_neg < few else "-" if GOOD in names else "--",
                "label": who_draws(who, n_neg),
            }
            for axes, course in zip((kl, weight), row["picture"]["course"].values(), strict=False):
                step, *spread = np.array(course).T
                median, low, high = np.where(np.isfinite(spread), spread, np.nan)
                axes.plot(step, median, lw=1.4, **style)
                axes.fill_between(step, low, high, color=style["color"], alpha=0.15, lw=0)
            lost += [f"{some}: {' + '.join(names)}" for some in [_lost([row])] if some]
        kl.set_title(_heading(spec, rows[0]), fontsize=11)
        words = "\n".join(lost)
        _beside(kl, 0.98, 0.02, words, ha="right", va="bottom", color=DARK, fontsize=8)
        weight.axhline(0.5, color=DARK, lw=0.8, ls=":")  # its share of the negatives
        weight.set_xlabel("update")
        unframed(kl)
        unframed(weight)
    above[0].set_yscale("log")
    above[0].set_ylim(top=min(above[0].get_ylim()[1], 1e3))
    above[0].set_ylabel(r"KL$(p_d\,\|\,p_\theta)$ (nats)")
    below[0].set_ylabel("weight on the good\n(dotted: its share)")
    below[0].set_ylim(0, 1.04)
    legend_below(figure, above[0])
    return figure


COLUMNS = (
    "Median [smallest, largest] over seeds; KL in nats. KL of SGLD(p_θ): from the truth to the "
    "kernel density estimate of the samples, both blurred alike, always of the good sampler. "
    "Energy scale: slope of the learned log density on the true one, 1 at the right temperature. "
    "oracle_r2: of F, the learned log density, against (log p_d − log q)/β + c, weighted by p_d; q "
    "is what negatives are drawn from. An undefined value ranks last. kl over: mean KL over that "
    "at β = 0, of mixtures over that of the first run; of seeds: medians of a seed's own ratio. "
    "GradScale and the weight on the good sampler's negatives are those of single updates, at the "
    "last five evaluations."
)
TITLES = {
    "2": "Figure 2: the default setup at different β",
    "5": "Figure 5: the circles, and the circles with twice as many updates",
    "6": "Figure 6: chains that start in the bottom right quadrant",
    "7": "Figure 7: the variants in the default setup",
    "8": "Figure 8: one negative from the initial distribution, no SGLD: the variants",
    "9": "Figure 9: negatives from the initial distribution, no SGLD: different β",
    "10": "Figure 10: the GMM with three negatives and three SGLD steps",
    "11": "Figure 11: the circles with three negatives and three SGLD steps",
    "1d": "A mixture in one dimension at different β",
    "mixture": "A good sampler, a mixture of it with a broken one, and the broken one alone",
    "broken": "Mixtures with other broken samplers, and with half as many negatives",
}


def _study(name: str) -> Study:
    spec = FIGURES[name]
    claim, holds = CLAIMS[2 if spec.has_mixtures else len(spec.variants) > 1]
    source = "robust objective, Appendix K" if name.isdigit() else "ours"
    return Study(TITLES[name], source, opened, members, draw_toy, COLUMNS, claim, holds)


STUDIES = {name: _study(name) for name in TITLES}
