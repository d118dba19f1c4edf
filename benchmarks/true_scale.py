"""β on the true scale: EBMs of images with o = 1, judged by annealing from both sides.

python -m benchmarks.true_scale                # the whole grid, two runs at a time
python -m benchmarks.true_scale --table-only   # the page and picture of what has been run
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import KernelDensity

from ebmguard.reference_training.plots.canvas import CONTRASTS, DARK, new_figure, unframed

from .cells import Grid, load, number, read_json, table, write_json
from .true_scale_cell import (
    ADAM,
    AIS_CHAINS,
    BATCH,
    BETAS,
    CELLS,
    CHAINS,
    FLOW,
    FLOW_UPDATES,
    FRESH,
    JUDGED,
    LEAPFROGS,
    LOST,
    LR,
    MOST,
    NOISE,
    SIDES,
    SIZE,
    STEPS,
    TEMPERATURES,
    UPDATES,
    Data,
    run,
    standard,
)

RUNS, PICTURE = Path("runs/bench-true-scale"), Path("docs/pictures/true_scale.png")
TITLES = {
    "fresh": "fresh chains",
    "adaptive": "fresh chains, adaptive steps",
    "persistent": "persistent chains",
    "mala": "MALA, persistent",
    "hmc": "HMC, persistent",
    "mixture": "half fresh, half persistent",
    "annealed": "annealed, weights known",
}
COLOURS = dict(zip(TITLES, CONTRASTS, strict=False))
NAMES = {
    "digits": "Digits at 8×8",
    "flow": "Digits at 8×8 on a flow",
    "mnist": "MNIST at 14×14",
}
WIDTHS = (0.15, 0.175, 0.2, 0.225, 0.25, 0.275, 0.3)
COMPONENTS = 10

Judgement = Mapping[str, Any]


def yardsticks(data: Data) -> dict[str, float]:
    """Mean log-likelihoods of the held-out images by densities that need no chains.

    The kernels' width is the best one for a fifth of the training images, by the other four fifths.
    """
    gaussian, noisy = data.gaussian, data.noisy
    train, test = (data.flow.inverse(u).double() @ gaussian.factor.T + gaussian.mean for u in noisy)
    fifth = len(train) // 5

    def kernels(width: float, centres: torch.Tensor, x: torch.Tensor) -> float:
        density = KernelDensity(bandwidth=width).fit(centres.numpy())
        return float(density.score_samples(x.numpy()).mean())

    width = max(WIDTHS, key=lambda h: kernels(h, data.train[fifth:], train[:fifth]))
    # Noise in expectation: the images' own covariances, and the noise's variance on top.
    mixture = GaussianMixture(COMPONENTS, reg_covar=NOISE**2, random_state=0)
    return {
        "the base": float(standard(data.pixels).log_prob(noisy[1]).mean()) - data.log_det,
        f"{COMPONENTS} Gaussians": float(mixture.fit(data.train.numpy()).score(test.numpy())),
        f"kernels of width {width:g} on the training images": kernels(width, data.train, test),
    }


def kept_yardsticks(name: str, data: Data, root: Path) -> dict[str, float]:
    """Those of a data set, kept beside the runs: those of MNIST take minutes."""
    file = root / f"yardsticks_{name}.json"
    if not file.is_file():
        write_json(file, yardsticks(data))
    return read_json(file)


def counts(judged: Judgement) -> bool:
    """Whether both sides of the annealing agree on log Z."""
    return not judged["problems"]


def interval(judged: Judgement, name: str = "test") -> tuple[float, float]:
    """Between which log-likelihoods the two sides put the images."""
    return judged[name] - judged["upper"], judged[name] - judged["lower"]


def middle(judged: Judgement, name: str = "test") -> float:
    """Of the interval."""
    return sum(interval(judged, name)) / 2


def between(judged: Judgement) -> str:
    """The interval, or what the two sides said and why it does not count."""
    low, high = interval(judged)
    return f"{low:.2f} to {high:.2f}" if counts(judged) else f"no: {low:.0f} and {high:.0f}"


def ess(judged: Judgement) -> str:
    """Effective chains of both sides."""
    return f"{judged['forward']['ess']:.0f}, {judged['reverse']['ess']:.0f}"


EVERY = {
    "images": lambda row: NAMES[row["data"]],
    "sampler": lambda row: TITLES[row["sampler"]],
    "β": lambda row: "–" if row["sampler"] == "annealed" else f"{row['beta']:g}",
    "seed": lambda row: str(row["seed"]),
    "updates": lambda row: f"{row['updates']:,}",
    "held-out, nats": lambda row: between(row),
    "training images": lambda row: number(middle(row, "train") if counts(row) else None, ".1f"),
    "ESS forward, reverse": lambda row: ess(row),
    "GradScale": lambda row: number(row["median"]["grad_scale"]),
    "ESS / M": lambda row: number(row["median"]["ess"], ".2f"),
    "ESS / M at 0.5": lambda row: number(row["median"].get("ref/ess"), ".2f"),
    "gap": lambda row: number(row["median"]["energy_gap"]),
    "acceptance": lambda row: number(row["median"].get("acceptance"), ".2f"),
    "steps": lambda row: number(row["median"].get("sampler/steps")),
}


def at_the_end(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of the runs that were trained to their end and whose number counts."""
    last = [run["judged"][-1] for run in runs if run["judged"]]
    return [middle(own) for own in last if own["updates"] == UPDATES and counts(own)]


def summary(runs: Sequence[Mapping[str, Any]]) -> str:
    """A line for each sampler, a column for each β: the median, and of how many runs."""
    lines = []
    for name, title in TITLES.items():
        own = [run for run in runs if run["sampler"] == name]
        if not own:
            continue
        line = {"sampler": title}
        for beta in sorted(BETAS):
            these = [run for run in own if run["beta"] == beta]
            line[f"β = {beta:g}"] = cell_of(these)
        line["weights known"] = cell_of(own) if name == "annealed" else ""
        lines.append(line)
    return table(lines, {name: itemgetter(name) for name in lines[0]})


def cell_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """The median of the runs that count, and how many do."""
    found = at_the_end(runs)
    if not runs:
        return ""
    said = f"{median(found):.2f}" if found else "none"
    return f"{said} ({len(found)} of {len(runs)})"


def draw(
    runs: Mapping[str, list[dict[str, Any]]],
    known: Mapping[str, Mapping[str, float]],
    file: Path,
) -> None:
    """Log-likelihoods against β, a panel for each data set: a point is a run."""
    height = 1.0 + 3.6 * len(runs)
    figure = new_figure(7.2, height)
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axes, name in zip(panels, runs, strict=True):
        panel(axes, runs[name], known[name])
        axes.set_title(NAMES[name])
        axes.set_ylabel("held-out log-likelihood, nats")
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


def panel(axes: Axes, runs: Sequence[Mapping[str, Any]], known: Mapping[str, float]) -> None:
    """The points of one data set, hollow where they do not count, and its yardsticks."""
    order = sorted(BETAS)
    floor = min([*known.values(), *(x for run in runs for x in at_the_end([run]))]) - 2
    names = [name for name in TITLES if any(run["sampler"] == name for run in runs)]
    for i, name in enumerate(names):
        colour, shift = COLOURS[name], 0.1 * (i - (len(names) - 1) / 2)
        for own in (own for own in runs if own["sampler"] == name and own["judged"]):
            last = own["judged"][-1]
            at = order.index(own["beta"]) if own["beta"] in order else len(order)
            seed = 0.02 * (own["seed"] - 2)
            filled = counts(last) and last["updates"] == UPDATES
            value = max(middle(last), floor) if np.isfinite(middle(last)) else floor
            face = colour if filled else "none"
            axes.plot(at + shift + seed, value, "o", ms=5, mec=colour, mfc=face)
    for (title, value), style in zip(known.items(), ("-", "--", ":"), strict=True):
        label = re.sub(r" of width [\d.]+", "", title)  # each panel has its own
        axes.axhline(value, color=DARK, lw=1, ls=style, label=label)
    names_of = [f"{beta:g}" for beta in order] + ["weights\nknown"]
    axes.set_xticks(range(len(names_of)), names_of)
    unframed(axes)
    axes.set_xlim(-0.5, len(order) + 0.5)


def page(root: Path) -> list[str]:
    """The lines of docs/results/true_scale.md; the picture is drawn beside it."""
    found = load(CELLS, root)
    runs = {name: [run for run in found if run["data"] == name] for name in SIDES}
    runs = {name: own for name, own in runs.items() if own}
    data = {name: Data.load(name) for name in runs}
    known = {name: kept_yardsticks(name, own, root) for name, own in data.items()}
    if runs:
        draw(runs, known, PICTURE)
    rows = [{**run, **judged} for run in found for judged in run["judged"]]
    samplers, sets = list(TITLES), list(SIDES)
    rows.sort(
        key=lambda r: (
            *(sets.index(r["data"]), samplers.index(r["sampler"])),
            *(r["beta"], r["seed"], r["updates"]),
        )
    )
    lost = [f"{run['cell'].name} at update {run['lost_at']:,}" for run in found if run["lost_at"]]
    lines = [
        "# β on the true scale",
        "",
        *GRID.source(root),
        f"Images with pixels in [-1, 1] and Gaussian noise of {NOISE:g}, training and held-out "
        "ones: all densities here are those of noisy images, in nats, and all numbers of a data "
        "set are of the same held-out images with the same noise. The model is "
        "log p(x) = log q(x) + g(x) - log Z with q the Gaussian of the training images, or a flow "
        f"on top of it ({FLOW} additive couplings, fitted in {FLOW_UPDATES:,} updates), and g a "
        "convolutional network of 34,000 parameters; o = 1: chains are Langevin steps of noise "
        f"{SIZE:g} and step size {SIZE**2 / 2:g} in the coordinates in which q is N(0, I). "
        f"{UPDATES:,} updates of {BATCH} images and negatives, {STEPS} gradients a chain (HMC: "
        f"{STEPS // LEAPFROGS} times {LEAPFROGS} leapfrog steps; annealed: {STEPS // 2} "
        "temperatures up, and as many down for the positives; adaptive: up to "
        f"{MOST} times as many steps, as many times finer), Adam with learning rate "
        f"{LR:g} and betas {ADAM}, a cosine to 0, judged by the average of the weights over the "
        f"last 1,000 updates. Fresh chains start from q; persistent ones are {CHAINS:,}, "
        f"{FRESH:.0%} of each draw anew.",
        "",
        f"A number counts if annealing from both sides agrees within 1 nat: {TEMPERATURES:,} "
        f"temperatures, {AIS_CHAINS} chains a side, the reverse ones from {TEMPERATURES:,} steps "
        "of MALA that began at training images. What is given is the interval with two standard "
        "errors of each side. The images are the same for all: differences between lines are "
        "not blurred by which images they were.",
        "",
    ]
    for name, own in runs.items():
        yards = "; ".join(f"{title} {value:.2f}" for title, value in known[name].items())
        counted = f"{len(data[name].train):,} to train on, {len(data[name].test):,} held out"
        lines += [f"## {NAMES[name]}", "", f"{counted}. Yardsticks, of the same images: {yards}."]
        lines += ["", summary(own), ""]
    return [
        *lines,
        f"![Held-out log-likelihood against β](../pictures/{PICTURE.name})",
        "",
        "A point is a run; hollow ones do not count, and none is drawn below the lower edge.",
        "",
        "## Every run",
        "",
        "GradScale, ESS / M of the weights (and at the exponent 0.5), the energy gap of g, the "
        "acceptance of MALA and HMC, and the steps of the adaptive sampler are medians of the last "
        "1,000 updates. "
        f"Lost, |gap| > {LOST:,.0f}: {', '.join(lost) or 'none'}. Judged after "
        f"{', '.join(f'{count:,}' for count in JUDGED)} updates.",
        "",
        table(rows, EVERY) if rows else "None yet.",
        "",
    ]


GRID = Grid("true_scale", CELLS, page, Path("docs/results/true_scale.md"), RUNS, run, kept=True)

if __name__ == "__main__":
    GRID.main()
