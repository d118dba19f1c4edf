"""β on the true scale: EBMs of images with o = 1, judged by annealing from both sides.

python -m benchmarks.true_scale                # the whole grid, two runs at a time
python -m benchmarks.true_scale --table-only   # the page and picture of what is known
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from sklearn.mixture import GaussianMixture
from torch import Tensor

from ebmguard.reference_training.plots.canvas import CONTRASTS, DARK, new_figure, unframed

from . import true_scale_cell
from .grid import Grid, Rows, number, table, table_of
from .true_scale_cell import BATCH, BETAS, CELLS, JUDGED, KNOWN, MOST, UPDATES
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

Judgement = Mapping[str, Any]
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


def counts(judged: Judgement) -> bool:
    """Whether both sides of the annealing say log Z, and the same."""
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
    return f"{low:.2f} to {high:.2f}" if counts(judged) else f"no: {low:.1f} and {high:.1f}"


def ess(judged: Judgement) -> str:
    """Effective chains of both sides."""
    return f"{judged['forward']['ess']:.0f}, {judged['reverse']['ess']:.0f}"


def ended(run: Run) -> Judgement | None:
    """What is known of a run that was trained to its end."""
    return next((own for own in run["judged"] if own["updates"] == UPDATES), None)


def in_the_end(said: Callable[[Judgement], str], lost: str = "–") -> Callable[[Run], str]:
    """A column that speaks of runs that were trained to their end."""
    return lambda run: said(own) if (own := ended(run)) else lost


def seen(name: str, form: str = ".3g") -> Callable[[Run], str]:
    """A column of medians over the last updates; annealed negatives have another f."""

    def said(run: Run) -> str:
        own = None if run["sampler"] == "annealed" and name in OF_F else ended(run)
        return number(own and own["median"].get(name), form)

    return said


def at_rest(judged: Judgement) -> str:
    """What negatives would be like if chains came to an end."""
    own = judged["converged"]
    return f"{own['grad_scale']:.3f}, {own['ess']:.2f}, {own['energy_gap']:.1f}" if own else "–"


def trained(judged: Judgement) -> str:
    """The log-likelihood of the training images, where it counts."""
    return number(middle(judged, "train") if counts(judged) else None, ".1f")


OF_F = ("ref/grad_scale", "ref/ess", "energy_gap")
EVERY: dict[str, Callable[[Run], str]] = {
    "images": lambda run: NAMES[run["data"]],
    "sampler": lambda run: TITLES[run["sampler"]],
    "β": lambda run: "–" if run["sampler"] == "annealed" else f"{run['beta']:g}",
    "seed": lambda run: str(run["seed"]),
    "held-out, nats": in_the_end(between, "lost"),
    "ESS forward, reverse": in_the_end(ess),
    "training images": in_the_end(trained),
    f"after {JUDGED[0]:,}": lambda run: between(run["judged"][0]),
    f"ESS after {JUDGED[0]:,}": lambda run: ess(run["judged"][0]),
    "GradScale": seen("grad_scale"),
    "ESS / M": seen("ess", ".2f"),
    "GradScale at 0.5": seen("ref/grad_scale"),
    "ESS / M at 0.5": seen("ref/ess", ".2f"),
    "gap": seen("energy_gap"),
    "GradScale, ESS / M, gap of converged chains": in_the_end(at_rest),
    "acceptance": seen("acceptance", ".2f"),
    "steps": seen("sampler/steps"),
}


def error(run: Run) -> str:
    """When the guard first said ERROR."""
    if "first_error" not in run:
        return "alerts not kept"
    first = run["first_error"]
    return f"first ERROR in update {first:,}" if first else "no ERROR"


def by_beta(runs: Sequence[Run], said: Callable[[Sequence[Run], Sequence[Run]], str]) -> str:
    """A line for each sampler, a column for each β: what is said of its runs, and of those at 0."""
    titles = {beta: f"β = {beta:g}" for beta in BETAS} | {KNOWN: "weights known"}
    lines = []
    for name, title in TITLES.items():
        own = {
            beta: [run for run in runs if run["sampler"] == name and run["beta"] == beta]
            for beta in titles
        }
        if any(own.values()):
            cells = {titles[beta]: said(these, own[0.0]) for beta, these in own.items()}
            lines.append({"sampler": title, **cells})
    return table_of(lines)


def median_of(runs: Sequence[Run], _: Sequence[Run]) -> str:
    """The median of the runs that count, and how many do."""
    if not runs:
        return ""
    found = [middle(own) for run in runs if (own := ended(run)) and counts(own)]
    said, lost = f"{median(found):.2f}" if found else "none", sum(bool(x["lost_at"]) for x in runs)
    return f"{said} ({len(found)} of {len(runs)}{f', {lost} lost' if lost else ''})"


def against_zero(runs: Sequence[Run], at_zero: Sequence[Run]) -> str:
    """What the same seeds gain on β = 0, of those where both count: the median, and of how many."""
    if not runs or runs is at_zero:
        return ""
    zero = {run["seed"]: own for run in at_zero if (own := ended(run)) and counts(own)}
    more = [(own, run["seed"]) for run in runs if (own := ended(run)) and counts(own)]
    pairs = [(own, zero[seed]) for own, seed in more if seed in zero]
    if not pairs:
        return "–"
    better = sum(interval(own)[0] > interval(zero)[1] for own, zero in pairs)
    worse = sum(interval(own)[1] < interval(zero)[0] for own, zero in pairs)
    gain = median(middle(own) - middle(zero) for own, zero in pairs)
    return f"{gain:+.2f} ({better} better, {worse} worse of {len(pairs)})"


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
    last = [own for run in runs if (own := ended(run)) and counts(own)]
    foot = min([*known.values(), *map(middle, last)]) - 2
    names = [name for name in TITLES if any(run["sampler"] == name for run in runs)]
    for each in runs:
        shift = 0.1 * (names.index(each["sampler"]) - (len(names) - 1) / 2)
        at, c = (
            order.index(each["beta"]) + shift + 0.02 * (each["seed"] - 2),
            COLOURS[each["sampler"]],
        )
        if (own := ended(each)) is None:
            axes.plot(at, foot, "x", ms=6, mew=1.5, c=c)
        elif counts(own):
            axes.plot(at, middle(own), "o", ms=5, c=c)
        else:
            axes.plot(at, foot, "o", ms=5, mec=c, mfc="none")
    for (title, value), style in zip(known.items(), ("-", "--", ":"), strict=True):
        label = re.sub(r" of width [\d.]+", "", title)  # each panel has its own
        axes.axhline(value, color=DARK, lw=1, ls=style, label=label)
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
        said[f"{name}-medians"] = by_beta(own, median_of)
        said[f"{name}-gains"] = by_beta(own, against_zero)
    lost = [
        f"{run['cell']} at β = {run['beta']:g} in update {run['lost_at']:,}, {error(run)}"
        for run in runs
        if run["lost_at"]
    ]
    kept = [run["first_error"] for run in runs if "first_error" in run and not run["lost_at"]]
    counted = f"Of {len(kept)} others whose alerts were kept {sum(map(bool, kept))} had an ERROR."
    places = {name: i for i, name in enumerate((*SIDES, *TITLES))}
    judged = sorted(
        (run for run in runs if run["judged"]),
        key=lambda run: (places[run["data"]], places[run["sampler"]], run["beta"], run["seed"]),
    )
    said["lost"] = f"{'; '.join(lost) or 'none'}. {counted}"
    return said | {"every": table(judged, EVERY)}


def told(known: Mapping[str, Any]) -> str:
    """How many images a data set has, and its yardsticks."""
    yards = "; ".join(f"{title} {value:.2f}" for title, value in known["yardsticks"].items())
    counts = f"{known['train']:,} to train on, {known['test']:,} held out"
    return f"{counts}. Yardsticks, of the same images: {yards}."


WITH_YARDSTICKS = CELLS | {
    f"{name}_yardsticks": {"sampler": None, "seed": None, "data": name, "betas": None}
    for name in SIDES
}
GRID = Grid("true_scale", WITH_YARDSTICKS, measure, slots, trains_here=True)

if __name__ == "__main__":
    sys.exit(GRID.main())
