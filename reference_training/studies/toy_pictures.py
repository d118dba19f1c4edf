"""The toy figures as pictures: densities in the paper's layout, the trade-off, and trainings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..plots.canvas import COLOURS, DARK, Canvas, new_figure, unframed
from ..plots.numbers import number
from ..plots.page import plain
from ..toy.scenario import GOOD, SAMPLERS
from .study import ABOUT, Study
from .toy import FIGURES, Spec, opened
from .toy_numbers import (
    DATA,
    default_is_best,
    members,
    nearer_with_beta,
    one_good_is_enough,
    who_draws,
)

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
# All in inches, of the figures in two dimensions.
PANEL, IN_PAIR, BETWEEN_PAIRS = 1.2, 0.06, 0.22
CAPTION, BETWEEN_BANDS, LEFT, TOP = 0.34, 0.14, 0.74, 0.98


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

    def left(column: int) -> float:
        """Of a column; 0 is the truth, 2 k + 1 and 2 k + 2 are pair k."""
        gaps = (column + 1) // 2 * BETWEEN_PAIRS + column // 2 * IN_PAIR
        return LEFT + column * PANEL + gaps

    def top(row: int) -> float:
        return TOP + row * (PANEL + CAPTION) + row // 2 * BETWEEN_BANDS

    rows, pairs = 2 * len(bands), len(bands[0])
    canvas = Canvas(left(2 * pairs) + PANEL + 0.14, top(rows) + 0.36)
    canvas.write(LEFT, 0.22, title, ha="left", fontsize=12)
    note = NOTE.replace("0;", "0, each on its own colour scale;")
    canvas.write(LEFT, canvas.height - 0.3, note, ha="left", fontsize=8, color=DARK)
    for k, row in enumerate(bands[0]):
        start, end = left(2 * k + 1), left(2 * k + 2) + PANEL
        canvas.write((start + end) / 2, TOP - 0.44, _heading(spec, row), fontsize=12)
        canvas.rule(start, end, TOP - 0.3)
    for j in range(rows):
        canvas.write(0.56, top(j) + PANEL / 2, ROWS[j % 2], fontsize=9, rotation=90)
    beside: dict[str, Any] = {"fontsize": 11, "rotation": 90, "linespacing": 1.1}
    for j, band in enumerate(bands):
        middle = (top(2 * j) + top(2 * j + 1) + PANEL) / 2
        canvas.write(0.24, middle, band[0]["picture"]["band"], fontweight="bold", **beside)
    names = ["truth", *["learned", "sampled"] * pairs]
    for i, name in enumerate(names):
        canvas.write(left(i) + PANEL / 2, TOP - 0.14, LABELS[name], fontsize=10)
        for j in range(rows):
            _image(
                canvas, left(i), top(j), bands[j // 2][max(0, i - 1) // 2]["picture"], name, j % 2
            )
    return canvas.figure


def _image(
    canvas: Canvas, x: float, y: float, picture: dict[str, Any], name: str, log: int
) -> None:
    axes, (image, words) = canvas.axes(x, y, PANEL, PANEL), picture[name][log]
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_linewidth(0.4)
    if image is None:
        axes.set_facecolor("#E6E6E6")
        canvas.write(x + PANEL / 2, y + PANEL / 2, picture["instead"], fontsize=9, color=DARK)
    else:
        # Each panel has its own scale, as in the paper: beside a density that is far too sharp all
        # others would be black.
        axes.imshow(image, cmap="viridis", origin="upper", aspect="auto")
    below = {"va": "top", "fontsize": 7.5, "linespacing": 1.1}
    canvas.write(x + PANEL / 2, y + PANEL + 0.04, words, **below)


def _lines(spec: Spec, bands: Sequence[Rows], title: str) -> Figure:
    """Densities on (n,) grids as lines: truth, p_θ and the estimate of SGLD(p_θ)."""
    (band,) = bands
    figure = new_figure(2.95 * len(band) + 0.5, 6.7)
    figure.set_layout_engine("constrained", hspace=0.06)
    styles: dict[str, dict[str, Any]] = {
        "truth": {"color": "black", "lw": 2.2, "alpha": 0.45},
        "learned": {"color": COLOURS[1], "lw": 1.3},
        "sampled": {"color": COLOURS[0], "lw": 1.3, "ls": "--"},
    }
    for i, axes in enumerate(figure.subplots(2, len(band)).flat):
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
                axes.annotate(note, (0.98, 0.96), xycoords="axes fraction", ha="right", va="top")
    figure.axes[len(band) - 1].legend(loc="upper left", frameon=False, fontsize=9)
    figure.supxlabel(NOTE, fontsize=8, color=DARK)
    figure.suptitle(title)
    return figure


def draw_tradeoff(spec: Spec, frame: pd.DataFrame, title: str) -> Figure:
    """How far p_θ is from the data, and SGLD(p_θ): medians over seeds with their range."""
    runs = [_bands(spec, own) for _, own in frame.groupby("scenario", sort=False)]
    ordered, many = spec.down == "variant", len(runs[0]) > 1
    figure = new_figure(max(5.0 * len(runs), 10.0 if many else 6.5), 4.3)
    figure.set_layout_engine("constrained")
    for axes, bands in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        # Variants have no order and no distance that an axis or a line could show.
        places = np.array([float(r["beta"]) if ordered else k for k, r in enumerate(bands[0])])
        width = np.ptp(places)
        for i, band in enumerate(bands):
            for k, (metric, (label, form)) in enumerate(KINDS.items()):
                spreads = np.array([row[metric] for row in band])
                # No point, and no whisker, where a logarithmic axis could not show it.
                middle, low, high = np.where(spreads > 0, spreads, np.nan).T
                colour = COLOURS[i if many else k]
                axes.errorbar(
                    # The lines of one pair of axes are set apart.
                    places + 0.012 * width * (i - (len(bands) - 1) / 2),
                    middle,
                    yerr=np.nan_to_num([middle - low, high - middle], posinf=0),
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
    _finish(figure, figure.axes[0], title)
    return figure


def _lost(rows: Sequence[dict[str, Any]]) -> str:
    lost, seeds = (sum(row[name] for row in rows) for name in ("diverged", "seeds"))
    return f"{lost} of {seeds} diverged" if lost else ""


def _finish(figure: Figure, axes: Axes, title: str) -> None:
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)


def draw_curves(spec: Spec, frame: pd.DataFrame, title: str) -> Figure:
    """KL(p_d‖p_θ) over updates, and below it the weight on the good sampler's negatives."""
    figure = new_figure(3.1 * len(spec.betas), 5.6)
    figure.set_layout_engine("constrained")
    shared: dict[str, Any] = {"squeeze": False, "sharex": True, "sharey": "row"}
    above, below = figure.subplots(2, len(spec.betas), height_ratios=(2, 1), **shared)
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
            lost += [f"{words}: {' + '.join(names)}" for words in [_lost([row])] if words]
        kl.set_title(_heading(spec, rows[0]), fontsize=11)
        place: dict[str, Any] = {"transform": kl.transAxes, "ha": "right", "va": "bottom"}
        kl.text(0.98, 0.02, "\n".join(lost), color=DARK, fontsize=8, **place)
        weight.axhline(0.5, color=DARK, lw=0.8, ls=":")  # its share of the negatives
        weight.set_xlabel("update")
        unframed(kl)
        unframed(weight)
    above[0].set_yscale("log")
    above[0].set_ylim(top=min(above[0].get_ylim()[1], 1e3))
    above[0].set_ylabel(r"KL$(p_d\,\|\,p_\theta)$ (nats)")
    below[0].set_ylabel("weight on the good\n(dotted: its share)")
    below[0].set_ylim(0, 1.04)
    _finish(figure, above[0], title)
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
CLAIMS = (
    ("at every β > 0 the median seed's KL(p_d‖p_θ) is below its own at β = 0", nearer_with_beta),
    ("no other variant is nearer to the data than the default in all seeds", default_is_best),
    ("one good sampler in a mixture: mean KL at most a fifth above its own", one_good_is_enough),
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
