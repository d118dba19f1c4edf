"""Figure "reconstruction": held-out images, and the nearest to them that a chain can end at.

Nijkamp et al. (2019), section 3.4, with the controls that tell what the error shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..plots.canvas import COLOURS, DARK
from ..plots.page import BETWEEN, SIDE, page, plain, show_rows
from ..shortrun.flow.invert import ITERATIONS, first_guess, invert
from ..shortrun.trained import TrainedRun
from .config import ShortRunFigure
from .measures import components_needed, nearest, principal_errors
from .shortrun import by_run, check_runs, named, opened, some_of
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
TRAINED, UNTRAINED = "trained", "untrained"
NEAREST, CUBE, FREE = "nearest training image", "in the cube", "free"


def inverses(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Held-out images, and images that are no data, with the nearest M(z), z in the cube and free.

    M is the map of the fewest steps that a run trained with, without noise; z is searched for from
    x / 2, by the trained network and by that of the run's seed.
    """
    count = config.count or 64
    check_runs(runs, "reconstruction", most=4, held_out=count)
    return frame_of([row for run in runs for row in _rows(run, count, config.seed)])


def _rows(run: TrainedRun, count: int, seed: int) -> Iterator[dict[str, Any]]:
    data = run.data
    generator = torch.Generator(run.device).manual_seed(seed)
    x = some_of(run, data.test_x, generator, count)
    mean = data.scale(data.train_x.double().mean(0))
    some = x[:CONTROLS]
    order = torch.randperm(x[0].numel(), generator=generator, device=run.device)
    noise = run.starts(len(some), generator)
    permuted = some.flatten(1)[:, order].reshape(some.shape)
    of_noise, of_some = _variance(noise, 0.0 * mean), _variance(some, mean)
    kinds = {HELD_OUT: (x, variance := _variance(x, mean))}
    kinds |= {PERMUTED: (permuted, of_some), NOISE: (noise, of_noise)}
    principal = principal_errors(x, data.train_x, data.levels).cpu()
    fresh = run.config.make_network(data).eval().requires_grad_(False)
    for network, f, targets in (
        (TRAINED, run.network, kinds),
        (UNTRAINED, fresh, {HELD_OUT: (some, of_some)}),
    ):
        for z in (CUBE, FREE):
            # All kinds together: the map is run for all of them at once.
            every = torch.cat([images for images, _ in targets.values()])
            found = invert(
                f,
                every,
                steps=run.settings.sgld_steps,
                step_size=run.step_size,
                z0=first_guess(every),
                inside=z == CUBE,
                stages=STAGES,
            )
            begin = 0
            for images, (target, size) in targets.items():
                part = slice(begin, begin := begin + len(target))
                course = found.course[:, part].double().mean(1)
                error = errors(found.error[part], size)
                before = course[-1 - len(course) // 10]
                fell = (1 - course[-1] / before).item() if before > 0 else 0.0
                row = {**named(run), "images": images, "network": network, "z": z, **error}
                if images == HELD_OUT:
                    row["components"] = components_needed(principal, error["error"])
                yield row | {
                    "outside": (found.z[part].abs() > 1).double().mean().item(),
                    "largest": found.z[part].abs().max().item(),
                    "still_falling": fell,
                    "variance": size,
                    "course": course.cpu().numpy(),
                    "target": target,
                    "stages": found.stages[:, part],
                }
    distance, place = nearest(x, data.train_x, data.levels)
    told = min(len(principal) - 1, x[0].numel() // 4)
    baselines = {NEAREST: distance.double().square().cpu()}
    baselines |= {f"{told} components": principal[told], "mean training image": principal[0]}
    for network, each in baselines.items():
        needed = components_needed(principal, each.mean().item())
        row = {**named(run), "images": HELD_OUT, "network": network, **errors(each, variance)}
        row |= {"components": needed, "variance": variance}
        if network == NEAREST:
            row |= {
                "target": data.scale(data.train_x[place]),
                "principal": principal.mean(1).numpy(),
            }
        yield row


def _variance(x: Tensor, mean: Tensor) -> float:
    return (x - mean).double().square().mean().item()


def errors(each: Tensor, variance: float) -> dict[str, Any]:
    """Mean squared errors of images, (N,): their mean, its standard error, and of the variance."""
    error = each.mean().item()
    spread = each.double().std().item() / math.sqrt(len(each)) if len(each) > 1 else math.nan
    own = {"count": len(each), "error": error, "standard_error": spread}
    return own | {"of_variance": error / variance, "errors": each.cpu().numpy()}


def prefers_data(frame: pd.DataFrame) -> bool | None:
    """Whether less of the variance of data is left than of other images, with z in the cube.

    None where all of them are reached: what is left is rounding.
    """
    said = []
    for own in by_run(frame[(frame["network"] == TRAINED) & (frame["z"] == CUBE)]):
        left = own.set_index("images")["of_variance"]
        others = min(left[PERMUTED], left[NOISE])
        said.append(None if max(left[HELD_OUT], others) <= LEAST else bool(left[HELD_OUT] < others))
    return None if None in said else all(said)


def draw_inverses(frame: pd.DataFrame, title: str) -> Figure:
    """For each run rows of images, and beside them errors over the iterations and components."""
    cell, apart, header = 0.56, 0.18, 0.35
    left, width, height, below = 8.55, 3.2, 2.45, 0.75

    def run(own: pd.DataFrame, groups: Any, canvas: Any, y: float) -> None:
        canvas.write(SIDE, y + 0.1, own[ABOUT].iloc[0], fontsize=10, ha="left")
        y += header
        _draw_courses(canvas.axes(left, y, width, height), own)
        _draw_components(canvas.axes(left, y + height + below, width, height), own)
        for group in groups:
            y = apart + show_rows(canvas, 2.05, y, group, cell)

    blocks = []
    for own in by_run(frame):
        groups = _images(own)
        images = sum(map(len, groups)) * (cell + BETWEEN) + (len(groups) - 1) * apart
        tall = max(images, 2 * height + below + 0.2)
        blocks.append((header + tall + 0.45, partial(run, own, groups)))
    words = (
        "x = M(z), the steps of training without noise; z by descent on |x − M(z)|² after t "
        "iterations; cut to [-1, 1] for display"
    )
    return page(title, words, blocks, width=12.0)


def _one(own: pd.DataFrame, network: str, images: str = HELD_OUT, z: str | None = None) -> Any:
    rows = own[(own["network"] == network) & (own["images"] == images)]
    return rows[rows["z"] == z].iloc[0] if z else rows.iloc[0]


def _images(own: pd.DataFrame) -> list[list[tuple[str, Tensor]]]:
    """The rows of images of a run, in groups that lie apart."""
    cube, free = (_one(own, TRAINED, z=z) for z in (CUBE, FREE))
    stages = [
        (f"t = {stage}{', z in the cube' if stage else ''}", images)
        for stage, images in zip(STAGES, cube["stages"], strict=True)
    ]
    first = [
        (HELD_OUT, cube["target"]),
        *stages,
        (f"t = {STAGES[-1]}, z free", free["stages"][-1]),
        ("untrained, in the cube", _one(own, UNTRAINED, z=CUBE)["stages"][-1]),
        (NEAREST, _one(own, NEAREST)["target"]),
    ]
    controls = [_one(own, TRAINED, kind, CUBE) for kind in (PERMUTED, NOISE)]
    groups = [first]
    groups += [[(o["images"], o["target"]), ("z in the cube", o["stages"][-1])] for o in controls]
    return [[(label, images[:SHOWN]) for label, images in group] for group in groups]


def _draw_courses(axes: Axes, own: pd.DataFrame) -> None:
    kinds = ((TRAINED, HELD_OUT), (UNTRAINED, HELD_OUT), (TRAINED, PERMUTED), (TRAINED, NOISE))
    for (network, images), colour in zip(kinds, COLOURS, strict=True):
        for z, style in ((CUBE, "-"), (FREE, "--")):
            one = _one(own, network, images, z)
            label = (images if network == TRAINED else UNTRAINED) if z == CUBE else None
            shares = one["course"] / one["variance"]
            axes.plot(shares, color=colour, ls=style, lw=1.4, label=label)
    axes.set_xlim(0, STAGES[-1])
    _finish(axes, own, "error, of variance; dashed: z free", "iteration t")
    axes.set_ylim(bottom=LEAST)
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def _draw_components(axes: Axes, own: pd.DataFrame) -> None:
    near = _one(own, NEAREST)
    shares = near["principal"] / near["variance"]
    axes.plot(shares[shares > LEAST], color=DARK, lw=1.4, label="principal components")
    share = _one(own, TRAINED, z=CUBE)["of_variance"]
    axes.axhline(share, color=COLOURS[0], lw=1.4, label="z in the cube")
    axes.set_xlim(left=0)
    words = f"principal components, of {near['target'][0].numel():,}"
    _finish(axes, own, "error, of variance, of held-out images", words)
    axes.legend(fontsize=7, frameon=False, loc="lower left")


def _finish(axes: Axes, own: pd.DataFrame, title: str, xlabel: str) -> None:
    near = _one(own, NEAREST)["of_variance"]
    axes.axhline(near, color=DARK, lw=1, ls=":", label=NEAREST)
    axes.set_yscale("log")
    plain(axes, title, xlabel)


STUDIES = {
    "reconstruction": Study(
        "Held-out images, and the nearest that a chain ends at",
        "Nijkamp et al. (2019), section 3.4",
        opened,
        inverses,
        draw_inverses,
        "z minimises |x - M(z)|², M the K steps of training without noise, from z = x / 2. error: "
        "mean squared error per pixel and channel of images in [-1, 1], with its standard error. "
        "of_variance: over the mean squared difference from the mean training image (of noise: "
        "from 0). components: principal ones of the training images that leave as little. outside, "
        "largest: share of z's entries outside [-1, 1], where no chain starts, and the largest "
        "|z|. still_falling: share of the error that the last tenth of the iterations took. "
        "Permuted: held-out images with their pixels in another order, the same for all. "
        "Untrained: the same network as its seed initialises it; with z free, a map that has "
        "learned nothing reaches almost any image too.",
        "of data less of the variance is left, with z in the cube, than of other images",
        prefers_data,
    )
}
