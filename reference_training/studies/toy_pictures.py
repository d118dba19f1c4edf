"""The toy figures as pictures: densities in the paper's layout, the trade-off, and trainings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..plots.canvas import COLOURS, DARK, Canvas, unframed
from ..plots.numbers import number
from .study import Study
from .toy import FIGURES, Spec, opened
from .toy_curves import draw_curves, draw_tradeoff
from .toy_numbers import (
    DATA,
    Rows,
    bands_of,
    default_is_best,
    heading,
    members,
    nearer_with_beta,
    one_good_is_enough,
)

FLOOR = 1e-10
"""Added to a density before its logarithm is drawn, as in the code of Nijkamp et al. (2020)."""
ROWS = ("density", "log density")
LABELS = ("truth", r"$p_\theta$", r"SGLD$(p_\theta)$")
NUMBERS = (
    r"Below $p_\theta$: KL$(p_d\,\|\,p_\theta)$ in nats and total variation. "
    r"Below the kernel density estimate of SGLD$(p_\theta)$: the same, both blurred alike."
)
# All in inches, of the figures in two dimensions.
PANEL, IN_PAIR, BETWEEN_PAIRS = 1.2, 0.06, 0.22
CAPTION, BETWEEN_BANDS, LEFT, TOP = 0.34, 0.14, 0.74, 0.98


def draw_toy(frame: pd.DataFrame, title: str) -> dict[str, Figure]:
    """The densities, in one picture or one for each scenario, and how far they are off."""
    spec, name = FIGURES[frame.attrs["spec"]], f"figure_{frame.attrs['spec']}"
    runs = [own.to_dict("records") for _, own in frame.groupby("scenario", sort=False)]
    flat = runs[0][0]["truth"].ndim == 1
    if spec.split:
        data = [rows[0]["picture"]["data"] for rows in runs]
        drawn = {
            f"{name}_{d}": _images(spec, [rows], f"{title}, {DATA[d]}")
            for d, rows in zip(data, runs, strict=True)
        }
    else:
        drawn = {name: (_lines if flat else _images)(spec, runs, title)}
    words = f"{title}\nmedian and range over seeds"
    if spec.samplers:
        return drawn | {"curves": draw_curves(spec, runs, words)}
    return drawn | {"tradeoff": draw_tradeoff(spec, runs, words)}


def _headed(canvas: Canvas, left: float, title: str, words: str) -> None:
    canvas.write(left, 0.22, title, ha="left", fontsize=12)
    canvas.write(left, canvas.height - 0.3, f"{words}{NUMBERS}", ha="left", fontsize=8, color=DARK)


def _images(spec: Spec, runs: Sequence[Rows], title: str) -> Figure:
    """Densities on (n, n) grids; y grows downward, as in the paper."""
    bands = bands_of(spec, runs)

    def left(column: int) -> float:
        """Of a column; 0 is the truth, 2 k + 1 and 2 k + 2 are pair k."""
        gaps = (column + 1) // 2 * BETWEEN_PAIRS + column // 2 * IN_PAIR
        return LEFT + column * PANEL + gaps

    def top(band: int, row: int) -> float:
        return TOP + (2 * band + row) * (PANEL + CAPTION) + band * BETWEEN_BANDS

    height = top(len(bands) - 1, 1) + PANEL + CAPTION + 0.5
    canvas = Canvas(left(2 * len(bands[0])) + PANEL + 0.14, height)
    words = (
        "Densities of seed 0, each on its own colour scale; log density is log(density + 1e-10).\n"
    )
    _headed(canvas, LEFT, title, words)
    canvas.write(left(0) + PANEL / 2, TOP - 0.14, LABELS[0], fontsize=10)
    for k, row in enumerate(bands[0]):
        start, end = left(2 * k + 1), left(2 * k + 2) + PANEL
        canvas.write((start + end) / 2, TOP - 0.44, heading(spec, row), fontsize=12)
        canvas.rule(start, end, TOP - 0.3)
        for side in (1, 2):
            canvas.write(left(2 * k + side) + PANEL / 2, TOP - 0.14, LABELS[side], fontsize=10)
    beside = {"fontsize": 11, "rotation": 90, "linespacing": 1.1, "fontweight": "bold"}
    for i, band in enumerate(bands):
        middle = (top(i, 0) + top(i, 1) + PANEL) / 2
        canvas.write(0.24, middle, band[0]["picture"]["band"], **beside)
        for log, name in enumerate(ROWS):
            y = top(i, log)
            canvas.write(0.56, y + PANEL / 2, name, fontsize=9, rotation=90)
            _image(canvas, left(0), y, band[0], "truth", log)
            for k, row in enumerate(band):
                _image(canvas, left(2 * k + 1), y, row, "learned", log)
                _image(canvas, left(2 * k + 2), y, row, "sampled", log)
    return canvas.figure


def _density(row: dict[str, Any], which: str, log: int) -> np.ndarray | None:
    if row[which] is None:
        return None
    density: np.ndarray = row[which].numpy()
    return np.log(density + FLOOR) if log else density


def _below(row: dict[str, Any], which: str, log: int) -> Sequence[str]:
    if which == "truth":
        return ()
    metric = ("kl", "tv")[log] + "_sgld" * (which == "sampled")
    found: Sequence[str] = row["captions"][metric]
    return found


def _image(canvas: Canvas, x: float, y: float, row: dict[str, Any], which: str, log: int) -> None:
    axes = canvas.axes(x, y, PANEL, PANEL)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_linewidth(0.4)
    image = _density(row, which, log)
    if image is None:
        axes.set_facecolor("#E6E6E6")
        (instead,) = row["captions"].get("instead", ("not finite",))
        canvas.write(x + PANEL / 2, y + PANEL / 2, instead, fontsize=9, color=DARK)
    else:
        # Each panel has its own scale, as in the paper: beside a density that is far too sharp all
        # others would be black.
        axes.imshow(image, cmap="viridis", origin="upper", aspect="auto")
    below = {"va": "top", "fontsize": 7.5, "linespacing": 1.1}
    words = "\n".join(_below(row, which, log))
    canvas.write(x + PANEL / 2, y + PANEL + 0.04, words, **below)


def _lines(spec: Spec, runs: Sequence[Rows], title: str) -> Figure:
    """Densities on (n,) grids as lines: truth, p_θ and the estimate of SGLD(p_θ)."""
    (band,) = bands_of(spec, runs)
    width, height, between, caption, left = 2.5, 1.9, 0.45, 0.72, 0.75
    wide = left + len(band) * (width + between) - between + 0.15
    canvas = Canvas(wide, 1.0 + 2 * (height + caption) + 0.5)
    _headed(canvas, left, title, "Densities of seed 0; log density is log(density + 1e-10).\n")
    styles: tuple[dict[str, Any], ...] = (
        {"color": "black", "lw": 2.2, "alpha": 0.45},
        {"color": COLOURS[1], "lw": 1.3},
        {"color": COLOURS[0], "lw": 1.3, "ls": "--"},
    )
    for k, row in enumerate(band):
        x = left + k * (width + between)
        canvas.write(x + width / 2, 0.8, heading(spec, row), fontsize=12)
        for log, name in enumerate(ROWS):
            y = 1.0 + log * (height + caption)
            axes = canvas.axes(x, y, width, height)
            for label, which, style in zip(
                LABELS, ("truth", "learned", "sampled"), styles, strict=True
            ):
                curve = _density(row, which, log)
                curve = np.full(len(row["axis"]), np.nan) if curve is None else curve
                axes.plot(row["axis"], curve, label=label, **style)
            if not log:
                _cut(axes, row)
            axes.set_xlim(*row["axis"][[0, -1]].tolist())
            axes.tick_params(labelsize=8)
            unframed(axes)
            if k == 0:
                axes.set_ylabel(name)
                axes.yaxis.set_label_coords(-0.5 / width, 0.5)
            words = "\n".join(
                f"{label}: {', '.join(_below(row, which, log))}"
                for label, which in zip(LABELS[1:], ("learned", "sampled"), strict=True)
            )
            below = {"va": "top", "fontsize": 8, "linespacing": 1.2}
            canvas.write(x + width / 2, y + height + 0.26, words, **below)
    place = (left / canvas.width, 1 - 0.36 / canvas.height)
    style = {"borderaxespad": 0, "borderpad": 0, "ncols": 3, "frameon": False}
    handles = axes.get_legend_handles_labels()
    canvas.figure.legend(*handles, loc="upper left", bbox_to_anchor=place, **style)
    return canvas.figure


def _cut(axes: Axes, row: dict[str, Any]) -> None:
    """Show 2.5 heights of the truth's peak: p_θ may be many times as sharp."""
    top = 2.5 * float(row["truth"].max())
    axes.set_ylim(0, top)
    if row["learned"] is not None and row["learned"].max() > top:
        note = f"$p_\\theta$ reaches {number(float(row['learned'].max()), 2)}"
        axes.annotate(note, (0.98, 0.96), xycoords="axes fraction", ha="right", va="top")


_COLUMNS = (
    "Median [smallest, largest] over seeds; KL in nats. KL of SGLD(p_θ): from the truth to the "
    "kernel density estimate of the samples, both blurred alike. Energy scale: slope of the "
    "learned log density on the true one, 1 at the right temperature. An undefined value ranks "
    "last. gain: KL at β = 0 over the one at β; price: KL of SGLD(p_θ) at β over the one at 0; "
    "medians of a seed's two values."
)
_OPTIMUM = (
    " oracle_r2: of the learned log density F against (log p_d − log q)/β + c, weighted by p_d; q "
    "is what negatives are drawn from; a table of 40 cells a side, its expected loss summed "
    "exactly and minimised, has the R² beside it."
)
_SAMPLERS = (
    " SGLD(p_θ) is always that of the good sampler. GradScale and the weight on the good one's "
    "negatives are those of single updates, at the last five evaluations."
)


def _study(name: str, title: str) -> Study:
    spec = FIGURES[name]
    columns = _COLUMNS + _OPTIMUM * (name in "89") + _SAMPLERS * spec.samplers
    claim, holds = "at every β > 0 the median KL(p_d‖p_θ) is below that at β = 0", nearer_with_beta
    if spec.samplers:
        claim = "with one good sampler in a mixture the mean KL is at most a fifth above its own"
        holds = one_good_is_enough
    elif len(spec.variants) > 1:
        claim = "the default is as good as every other variant, or within the spread of seeds"
        holds = default_is_best
    source = "robust objective, Appendix K" if name.isdigit() else "ours"
    return Study(title, source, opened, members, draw_toy, columns, claim, holds)


_TITLES = {
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
STUDIES = {name: _study(name, title) for name, title in _TITLES.items()}
