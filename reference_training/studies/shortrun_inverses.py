"""Figure "reconstruction": held-out images, and the nearest to them that a chain can end at.

Nijkamp et al. (2019), section 3.4, with the controls that tell what the error shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from ..plots.canvas import COLOURS, DARK
from ..plots.markdown import NONE
from ..plots.page import BETWEEN, SIDE, page, plain, show_rows
from ..shortrun.flow.invert import ITERATIONS, Inverse, invert
from ..shortrun.trained import TrainedRun
from . import shortrun
from .config import ShortRunFigure
from .measures import components_needed, nearest, principal_errors
from .study import ABOUT, Study, frame_of

STAGES = (0, 5, 20, ITERATIONS)
"""Iterations whose images are shown."""
CONTROLS = 16
"""Images of each kind that is no data, and held-out images of the untrained network, at most."""
SHOWN = 10
"""Images of a kind, at most."""
LEAST = 1e-5
"""As a share of the variance, what is left of an image that a descent has reached is rounding."""
HELD_OUT, PERMUTED, NOISE = "held-out images", "permuted pixels", "noise"
TRAINED, UNTRAINED, NEAREST = "trained", "untrained", "nearest training image"
CUBE, FREE = "in the cube", "free"
"""Where z is searched for."""


def search(run: TrainedRun, f: nn.Module, x: Tensor, z: str, stages: Sequence[int] = ()) -> Inverse:
    """The z whose M(z) is nearest to x, by the fewest steps that the run trained with."""
    steps, size = run.settings.sgld_steps, run.step_size
    # From noise, where the paper begins, more descents end at another image than x.
    where = {"z0": x / 2, "inside": z == CUBE, "iterations": STAGES[-1]}
    return invert(f, x, steps=steps, step_size=size, stages=stages, **where)  # type: ignore[arg-type]


def inverses(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Held-out images, and images that are no data, with the nearest M(z), z in the cube and free.

    z is searched for from x / 2, by the trained network and by that of the run's seed.
    """
    count = config.count or 64
    shortrun.check_runs(runs, "reconstruction", most=4, held_out=count)
    return frame_of([row for run in runs for row in _inverses(run, count, config.seed)])


def _inverses(run: TrainedRun, count: int, seed: int) -> Iterator[dict[str, Any]]:
    data = run.data
    generator = torch.Generator(run.device).manual_seed(seed)
    x = shortrun.some_of(run, data.test_x, generator, count)
    some, mean = x[:CONTROLS], data.scale(data.train_x.double().mean(0))
    order = torch.randperm(x[0].numel(), generator=generator, device=run.device)
    permuted = some.flatten(1)[:, order].reshape(some.shape)
    noise = run.starts(len(some), generator)
    sizes = [(of - mean).double().square().mean().item() for of in (x, some)]
    targets = {HELD_OUT: (x, sizes[0]), PERMUTED: (permuted, sizes[1])}
    targets[NOISE] = (noise, noise.double().square().mean().item())
    fresh = run.config.make_network(data).eval().requires_grad_(False)
    principal = principal_errors(x, data.train_x, data.levels).cpu()
    for network, f, given in (
        (TRAINED, run.network, targets),
        (UNTRAINED, fresh, {HELD_OUT: (some, sizes[1])}),
    ):
        for z in (CUBE, FREE):
            # All kinds together: the map is run for all of them at once.
            found = search(run, f, torch.cat([own for own, _ in given.values()]), z, STAGES)
            begin = 0
            for images, (target, size) in given.items():
                part = slice(begin, begin := begin + len(target))
                course = found.course[:, part].double().mean(1).cpu().numpy()
                row = _errors(run, images, network, found.error[part], size)
                if images == HELD_OUT:
                    row["components"] = components_needed(principal, row["error"])
                yield row | {
                    "z": z,
                    "outside": (found.z[part].abs() > 1).double().mean().item(),
                    "largest": found.z[part].abs().max().item(),
                    "course": course,
                    "target": target,
                    "stages": found.stages[:, part],
                }
    distance, place = nearest(x, data.train_x, data.levels)
    told = min(len(principal) - 1, x[0].numel() // 4)
    baselines = {NEAREST: distance.double().square().cpu()}
    baselines |= {f"{told} components": principal[told], "mean training image": principal[0]}
    shown = {"target": data.scale(data.train_x[place]), "principal": principal.mean(1).numpy()}
    for network, each in baselines.items():
        row = _errors(run, HELD_OUT, network, each, sizes[0])
        row["components"] = components_needed(principal, row["error"])
        yield row | (shown if network == NEAREST else {})


def _errors(
    run: TrainedRun, images: str, network: str, each: Tensor, variance: float
) -> dict[str, Any]:
    """Mean squared errors of images, (N,): their mean, its standard error, and of the variance."""
    errors = pd.Series(each.cpu().numpy())
    return {
        **shortrun.named(run),
        "images": images,
        "network": network,
        "z": NONE,
        "count": len(errors),
        "error": each.mean().item(),
        "standard_error": errors.astype(float).sem(),
        "of_variance": each.mean().item() / variance,
        "variance": variance,
        "errors": errors.to_numpy(),
    }


def prefers_data(frame: pd.DataFrame) -> bool | None:
    """Whether less of the variance of data is left than of other images, with z in the cube.

    None where all of them are reached: what is left is rounding.
    """
    said = []
    for own in shortrun.by_run(frame[(frame["network"] == TRAINED) & (frame["z"] == CUBE)]):
        left = own.set_index("images")["of_variance"]
        others = min(left[PERMUTED], left[NOISE])
        said.append(None if max(left[HELD_OUT], others) <= LEAST else bool(left[HELD_OUT] < others))
    return None if None in said else all(said)


def draw_inverses(frame: pd.DataFrame, title: str) -> Figure:
    """For each run rows of images, and beside them errors over the iterations and components."""
    cell, apart, width, height = 0.56, 0.18, 3.2, 2.45

    def run(own: pd.DataFrame, canvas: Any, y: float) -> None:
        rows = {(row["network"], row["images"], row["z"]): row for row in own.to_dict("records")}
        cube, near = rows[TRAINED, HELD_OUT, CUBE], rows[NEAREST, HELD_OUT, NONE]
        canvas.write(SIDE, y + 0.1, own[ABOUT].iloc[0], fontsize=10, ha="left")
        y += 0.35
        panels = [canvas.axes(8.55, y + i * (height + 0.75), width, height) for i in range(2)]
        _draw_courses(panels[0], rows)
        principal = near["principal"] / near["variance"]
        panels[1].plot(
            principal[principal > LEAST], color=DARK, lw=1.4, label="principal components"
        )
        panels[1].axhline(cube["of_variance"], color=COLOURS[0], lw=1.4, label="z in the cube")
        panels[1].set_xlim(left=0)
        words = f"principal components, of {near['target'][0].numel():,}"
        plain(panels[1], "error, of variance, of held-out images", words)
        for axes, place in zip(panels, ("lower right", "lower left"), strict=True):
            axes.axhline(near["of_variance"], color=DARK, lw=1, ls=":", label=NEAREST)
            axes.set_yscale("log")
            axes.legend(fontsize=7, frameon=False, loc=place)
        panels[0].set_ylim(bottom=LEAST)
        stages = zip(STAGES, cube["stages"], strict=True)
        groups = [
            [
                (HELD_OUT, cube["target"]),
                *((f"t = {t}{', z in the cube' if t else ''}", images) for t, images in stages),
                (f"t = {STAGES[-1]}, z free", rows[TRAINED, HELD_OUT, FREE]["stages"][-1]),
                ("untrained, in the cube", rows[UNTRAINED, HELD_OUT, CUBE]["stages"][-1]),
                (NEAREST, near["target"]),
            ]
        ]
        for kind in (PERMUTED, NOISE):
            one = rows[TRAINED, kind, CUBE]
            groups.append([(kind, one["target"]), ("z in the cube", one["stages"][-1])])
        for group in groups:
            shown = [(label, images[:SHOWN]) for label, images in group]
            y = apart + show_rows(canvas, 2.05, y, shown, cell)

    words = (
        "x = M(z), the steps of training without noise; z by descent on |x − M(z)|² after t "
        "iterations; cut to [-1, 1] for display"
    )
    tall = 0.8 + (len(STAGES) + 8) * (cell + BETWEEN) + 2 * apart
    return page(
        title, words, [(tall, partial(run, own)) for own in shortrun.by_run(frame)], width=12.0
    )


def _draw_courses(axes: Axes, rows: dict[Any, dict[str, Any]]) -> None:
    kinds = ((TRAINED, HELD_OUT), (UNTRAINED, HELD_OUT), (TRAINED, PERMUTED), (TRAINED, NOISE))
    for (network, images), colour in zip(kinds, COLOURS, strict=True):
        for z, style in ((CUBE, "-"), (FREE, "--")):
            one = rows[network, images, z]
            label = (images if network == TRAINED else UNTRAINED) if z == CUBE else None
            shares = one["course"] / one["variance"]
            axes.plot(shares, color=colour, ls=style, lw=1.4, label=label)
    axes.set_xlim(0, STAGES[-1])
    plain(axes, "error, of variance; dashed: z free", "iteration t")


STUDIES = {
    "reconstruction": Study(
        "Held-out images, and the nearest that a chain ends at",
        "Nijkamp et al. (2019), section 3.4",
        shortrun.opened,
        inverses,
        draw_inverses,
        "z minimises |x - M(z)|², M the K steps of training without noise, from z = x / 2. error: "
        "mean squared error per pixel and channel of images in [-1, 1], with its standard error. "
        "of_variance: over the mean squared difference from the mean training image (of noise: "
        "from 0). components: principal ones of the training images that leave as little. outside, "
        "largest: share of z's entries outside [-1, 1], where no chain starts, and the largest "
        "|z|. Permuted: held-out images with their pixels in another order, the same for all. "
        "Untrained: the same network as its seed initialises it; with z free, a map that has "
        "learned nothing reaches almost any image too.",
        "of data less of the variance is left, with z in the cube, than of other images",
        prefers_data,
    ),
}
