"""β on the true scale: EBMs of images with o = 1, judged by annealing from both sides.

python -m benchmarks.true_scale                # the whole grid, two runs at a time
python -m benchmarks.true_scale --table-only   # the page and picture of what is known
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from sklearn.mixture import GaussianMixture
from torch import Tensor

from ebmguard.reference_training.plots.canvas import CONTRASTS, DARK, new_figure, unframed

from . import true_scale_cell
from .grid import Grid, Rows, table_of
from .true_scale_cell import BATCH, BETAS, CELLS, KNOWN, MOST, UPDATES
from .true_scale_model import NOISE, SIDES, Data, standard

PICTURE = Path("docs/pictures/true_scale.png")
TITLES = {
    "fresh": "fresh chains",
    "adaptive": "fresh chains, adaptive steps",
    "persistent": "persistent chains",
    "finer": f"persistent chains, {MOST} times finer",
    "more": f"persistent chains, {MOST * BATCH} negatives",
    "mala": "MALA, persistent",
    "hmc": "HMC, persistent",
    "mixture": "half fresh, half persistent",
    "annealed": "annealed, weights known",
}
COLOURS = dict(zip(TITLES, (*CONTRASTS, "#8C564B"), strict=True))
NAMES = {
    "digits": "Digits at 8×8",
    "flow": "Digits at 8×8 on a flow",
    "mnist": "MNIST at 14×14",
}
WIDTHS = tuple(0.025 * i for i in range(6, 19))
COMPONENTS = 10

Run = Mapping[str, Any]


def yardsticks(data: Data) -> dict[str, float]:
    """Mean log-likelihoods of the held-out images by densities that need no chains.

    The kernels' width is the best one for a fifth of the training images, by the other four fifths.
    """
    gaussian, noisy = data.gaussian, data.noisy
    train, test = (data.flow.inverse(u).double() @ gaussian.factor.T + gaussian.mean for u in noisy)
    fifth = len(train) // 5
    width = max(WIDTHS, key=lambda h: kernels(h, data.train[fifth:], train[:fifth]))
    # Noise in expectation: the images' own covariances, and the noise's variance on top.
    mixture = GaussianMixture(COMPONENTS, reg_covar=NOISE**2, random_state=0)
    return {
        "the base": float(standard(data.pixels).log_prob(noisy[1]).mean()) - data.log_det,
        f"{COMPONENTS} Gaussians": float(mixture.fit(data.train.numpy()).score(test.numpy())),
        f"kernels of width {width:g} on the training images": kernels(width, data.train, test),
    }


def kernels(width: float, centres: Tensor, x: Tensor) -> float:
    """Mean log density of x under a Gaussian kernel at each centre.

    As a sum over all centres: scikit-learn's trees get it wrong in 64 dimensions.
    """
    (count, pixels), squares = centres.shape, torch.cdist(x, centres).square()
    sums = torch.logsumexp(-squares / (2 * width**2), 1) - math.log(count)
    return float(sums.mean()) - pixels / 2 * math.log(2 * math.pi * width**2)


def measure(folder: Path, sampler: str | None, data: str, **settings: Any) -> dict[str, Any]:
    """The runs of a cell; of the one without a sampler, the yardsticks of a data set."""
    if sampler is not None:
        return true_scale_cell.measure(folder, sampler=sampler, data=data, **settings)
    own = Data.load(data)
    return {"yardsticks": yardsticks(own), "train": len(own.train), "test": len(own.test)}


def value(run: Run) -> float | None:
    """The held-out log-likelihood at a run's end, in the middle of where both sides put it.

    NaN where one of the sides says nothing of log Z, or another thing; None of a run that was lost.
    """
    own = next((own for own in run["judged"] if own["updates"] == UPDATES), None)
    if own is None:
        return None
    return math.nan if own["problems"] else own["test"] - (own["upper"] + own["lower"]) / 2


def medians(runs: Sequence[Run]) -> str:
    """A line for each sampler, a column for each β."""
    betas = {beta: f"β = {beta:g}" for beta in BETAS} | {KNOWN: "weights known"}
    used = {run["beta"] for run in runs}
    lines = []
    for name, title in TITLES.items():
        own = [run for run in runs if run["sampler"] == name]
        cells = {
            head: median_of([run for run in own if run["beta"] == beta])
            for beta, head in betas.items()
            if beta in used
        }
        lines += [{"sampler": title, **cells}] if own else []
    return table_of(lines)


def median_of(runs: Sequence[Run]) -> str:
    """The median of the runs that count, and how many do."""
    if not runs:
        return ""
    found = [x for x in map(value, runs) if x is not None and not math.isnan(x)]
    said, lost = f"{median(found):.2f}" if found else "none", sum(bool(x["lost_at"]) for x in runs)
    return f"{said} ({len(found)}/{len(runs)}{f', {lost} lost' if lost else ''})"


def draw(runs: Mapping[str, Sequence[Run]], known: Mapping[str, Run], file: Path) -> None:
    """Log-likelihoods against β, a panel for each data set: a point is a run."""
    height = 1.0 + 3.6 * len(runs)
    figure = new_figure(7.2, height)
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axes, name in zip(panels, runs, strict=True):
        panel(axes, runs[name], known[name]["yardsticks"])
        axes.set(title=NAMES[name], ylabel="held-out log-likelihood, nats")
    panels[-1].set_xlabel("β")
    used = {run["sampler"] for own in runs.values() for run in own}
    marks = [
        Line2D([], [], c=COLOURS[name], marker="o", ls="", label=title)
        for name, title in TITLES.items()
        if name in used
    ]
    yards, _ = panels[0].get_legend_handles_labels()
    figure.legend(handles=[*marks, *yards], loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.8 / height, 1, 1))
    figure.savefig(file)


def panel(axes: Axes, runs: Sequence[Run], known: Mapping[str, float]) -> None:
    """The points of one data set, at the foot where they do not count, and its yardsticks."""
    order = [*BETAS, KNOWN]
    values = [value(run) for run in runs]
    foot = np.nanmin([*known.values(), *(x for x in values if x is not None)]) - 2
    names = [name for name in TITLES if any(run["sampler"] == name for run in runs)]
    for each, found in zip(runs, values, strict=True):
        shift = 0.1 * (names.index(each["sampler"]) - (len(names) - 1) / 2)
        at, c = order.index(each["beta"]) + shift, COLOURS[each["sampler"]]
        at += 0.02 * (each["seed"] - 2)
        if found is None:
            axes.plot(at, foot, "x", ms=6, mew=1.5, c=c)
        elif math.isnan(found):
            axes.plot(at, foot, "o", ms=5, mec=c, mfc="none")
        else:
            axes.plot(at, found, "o", ms=5, c=c)
    for (title, at), style in zip(known.items(), ("-", "--", ":"), strict=True):
        label = re.sub(r" of width [\d.]+", "", title)  # each panel has its own
        axes.axhline(at, color=DARK, lw=1, ls=style, label=label)
    axes.set_xticks(range(len(order)), [*(f"{beta:g}" for beta in BETAS), "weights\nknown"])
    unframed(axes)
    axes.set_xlim(-0.5, len(order) - 0.5)


def slots(rows: Rows) -> dict[str, str]:
    """Those of the page; the picture is drawn beside it."""
    known = {row["data"]: row for row in rows if "yardsticks" in row}
    runs = [{**x, **member} for x in rows if "members" in x for member in x["members"]]
    of = {name: own for name in SIDES if (own := [x for x in runs if x["data"] == name])}
    if of:
        draw(of, known, PICTURE)
    said = {}
    for name in SIDES:
        own = of.get(name, [])
        said[f"{name}-yardsticks"] = told(known[name]) if name in known else "Not known yet."
        said[f"{name}-medians"] = medians(own)
    return said


def told(known: Mapping[str, Any]) -> str:
    """How many images a data set has, and its yardsticks."""
    yards = "; ".join(f"{title} {value:.2f}" for title, value in known["yardsticks"].items())
    counts = f"{known['train']:,} to train on, {known['test']:,} held out"
    return f"{counts}. Yardsticks, of the same images: {yards}."


WITH_YARDSTICKS = CELLS | {
    f"{name}_yardsticks": {"sampler": None, "seed": None, "data": name, "betas": None}
    for name in SIDES
}
GRID = Grid("true_scale", WITH_YARDSTICKS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
