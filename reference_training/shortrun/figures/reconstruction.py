"""Figure "reconstruction": held-out images, and the nearest to them that a chain can end at.

Nijkamp et al. (2019), section 3.4, with the controls that tell what the error shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.figure import Made
from ...plots.markdown import Columns, cells, heads, markdown_table
from ...plots.numbers import number
from ...plots.page import BETWEEN, SIDE, page, plain, show_rows
from .config import FigureConfig
from .measured import describe
from .principal import components_needed
from .reconstructed import (
    HELD_OUT,
    NOISE,
    PERMUTED,
    STAGES,
    TRAINED,
    UNTRAINED,
    Reconstructed,
    Reconstruction,
    reconstruct,
)
from .several import at_most, enough_held_out, from_noise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..trained import TrainedRun

COUNT = 64
"""Held-out images of each run."""
MOST_RUNS = 4
CONVERGED = 0.05
"""The descent counts as over where the last tenth of it took less than this share of the error."""
SHOWN = 10
"""Images of a kind, at most."""
LEAST = 1e-5
"""Where the axes of errors end, as a share of the variance: what is left of an image that a free
descent has reached is rounding."""
CURVES = (
    (TRAINED, HELD_OUT, COLOURS[0]),
    (UNTRAINED, HELD_OUT, COLOURS[1]),
    (TRAINED, PERMUTED, COLOURS[2]),
    (TRAINED, NOISE, COLOURS[3]),
)
"""Network, images, and how their errors are drawn: dashed where z is free."""
# All in inches.
WIDTH = 12.0
LABEL, CELL = 2.05, 0.56
HEADER, APART, AFTER = 0.35, 0.18, 0.45
PANEL_LEFT, PANEL_WIDTH, PANEL_HEIGHT, PANEL_BELOW = 8.55, 3.2, 2.45, 0.75

LEGEND = (
    "z minimises |x - M(z)|², M the K steps of training without noise, from z = x / 2. "
    "Error: mean squared error per pixel and channel of images in [-1, 1], mean over the "
    "images, with its standard error. Of variance: over the mean squared difference from the mean "
    "training image (of noise: from 0). PCA: principal components of the training images that "
    "leave as little. Outside, largest: share of z's entries outside [-1, 1], where no chain "
    "starts, and the largest |z|. Falling: share of the error that the last tenth of the "
    "iterations took. Permuted: held-out images with their pixels in another order, the same for "
    "all; noise: drawn of p_0 = U(-1, 1). Untrained: the same network as its seed initialises it."
)
MEANING = (
    "What it shows: z has as many numbers as the image, and as long as no step folds space over, M "
    "is one-to-one. With z free, a map that has learned nothing reaches almost any image; a small "
    "error then shows that the descent works, and nothing of the model. In the cube it shows how "
    "near the sampler can come, not that it is likely to: that is a matter of the volume of the "
    "starts that lead there (figure likelihood). That a model is one of its data shows where "
    "images that are no data, in the cube, are left with more of their variance."
)


def make(runs: Sequence[TrainedRun], config: FigureConfig) -> Made:
    """Reconstruct held-out images by every run, and what is held against them.

    Args:
        runs: any, if their chains start from noise.
        config: `count` is the number of held-out images.

    Raises:
        ConfigError: a run's chains go on from update to update, there are more runs than the
            picture has room for, or fewer test images than are asked for.
        ImportError: matplotlib is not installed.
    """
    from_noise(runs, "Figure reconstruction")
    at_most(runs, MOST_RUNS)
    count = config.count or COUNT
    enough_held_out(runs, count)
    found = [reconstruct(run, count=count, seed=config.seed) for run in runs]
    said = [sentence for own in found for sentence in statements(own)]
    text = "\n\n".join([LEGEND, *map(table, found), "\n".join([*said, MEANING])])
    return Made(draw(found), text, {"runs": [_numbers(own) for own in found], "statements": said})


COLUMNS: Columns = {
    "error": ("error", number),
    "standard_error": ("±", number),
    "of_variance": ("of variance", "{:.1%}".format),
    "needed": ("PCA", str),
    "outside": ("outside", "{:.1%}".format),
    "largest": ("largest", number),
    "still_falling": ("falling", "{:.1%}".format),
}


def table(own: Reconstructed) -> str:
    """A run's errors: a line for each kind of images and network, and for each baseline."""
    variance = own.one(TRAINED, HELD_OUT, inside=True).variance
    named = [
        *((o.images, f"{o.network}, z {_where(o)}", len(o.target), _values(o)) for o in own.found),
        *((HELD_OUT, k, len(e), _errors(e, variance)) for k, e in _baselines(own).items()),
    ]
    rows = []
    for images, name, count, values in named:
        if images == HELD_OUT:
            values["needed"] = _components(own, values["error"])
        rows.append([images, name, str(count), *cells(COLUMNS, values)])
    head = ["images", "reached by", "number", *heads(COLUMNS)]
    return f"{describe(own.run)}\n\n{markdown_table(head, rows, words=2)}"


def _values(one: Reconstruction) -> dict[str, Any]:
    return {
        **_errors(one.inverse.error, one.variance),
        "outside": one.outside,
        "largest": one.largest,
        "still_falling": one.still_falling,
    }


def _errors(errors: Tensor, variance: float) -> dict[str, Any]:
    """Mean squared errors, (N,), in numbers."""
    count, error = len(errors), errors.mean().item()
    spread = errors.double().std().item() / math.sqrt(count) if count > 1 else math.nan
    return {"error": error, "standard_error": spread, "of_variance": error / variance}


def _where(one: Reconstruction) -> str:
    return "in the cube" if one.inside else "free"


def _components(own: Reconstructed, error: float) -> str:
    needed = components_needed(own.principal, error)
    return f"> {len(own.principal) - 1}" if needed is None else str(needed)


def _baselines(own: Reconstructed) -> dict[str, Tensor]:
    """Errors of what asks no model, (N,) each."""
    return {
        "nearest training image": own.neighbour_error,
        f"{own.components} principal components": own.principal[own.components],
        "mean training image": own.principal[0],
    }


def statements(own: Reconstructed) -> list[str]:
    """Sentences that follow from a run's numbers."""
    said = [_against_baselines(own), _free(own), _training(own), _no_data(own)]
    if own.run.settings.activation == "leaky_relu":
        said.append(
            "its network is piecewise linear: dM/dz is the identity wherever it exists, the "
            "descent is a fixed-point iteration, and its errors are upper bounds of the least ones"
        )
    # What is left of an image that has been reached is rounding, and may still fall.
    falling = [one for one in own.found if one.still_falling > CONVERGED and one.share > LEAST]
    if falling:
        which = "; ".join(f"{one.images}, {one.network}, z {_where(one)}" for one in falling)
        said.append(f"the descent was not over for {which}: more iterations would lower the error")
    return [f"{own.run.name}: {sentence}." for sentence in said]


def _against_baselines(own: Reconstructed) -> str:
    one = own.one(TRAINED, HELD_OUT, inside=True)
    errors = one.inverse.error.cpu()
    below = int((errors < own.neighbour_error).sum())
    told = ", ".join(
        f"{name} {number(value.mean().item())}" for name, value in _baselines(own).items()
    )
    return (
        f"with z in the cube the error of {len(errors)} held-out images is "
        f"{number(errors.mean().item())} ({one.share:.1%} of their variance); that of the {told}. "
        f"It is below the nearest training image's for {below} of them"
    )


def _free(own: Reconstructed) -> str:
    one = own.one(TRAINED, HELD_OUT, inside=False)
    return (
        f"with z free it is {number(one.inverse.error.mean().item())}; {one.outside:.1%} of z's "
        f"entries leave the cube, as far as {number(one.largest)}"
    )


def _training(own: Reconstructed) -> str:
    parts = []
    for inside in (True, False):
        fresh = own.one(UNTRAINED, HELD_OUT, inside=inside)
        one = own.one(TRAINED, HELD_OUT, inside=inside)
        same = one.inverse.error[: len(fresh.target)].mean().item()
        parts.append(
            f"{number(fresh.inverse.error.mean().item())} with z {_where(one)} "
            f"(trained: {number(same)})"
        )
    count = len(own.one(UNTRAINED, HELD_OUT, inside=True).target)
    before = "before training"
    if own.run.config.start_from is not None:
        before += ", with its seed's parameters and not those that it started from"
    return f"{before}, {count} of these images had an error of {' and '.join(parts)}"


def _no_data(own: Reconstructed) -> str:
    data, *others = (own.one(TRAINED, k, inside=True) for k in (HELD_OUT, PERMUTED, NOISE))
    least = min(one.share for one in others)
    if max(data.share, least) <= LEAST:
        verdict = "all of them are reached, and this measure does not tell data from others"
    elif data.share < least:
        # Below LEAST is rounding, which is no measure of how much nearer data are.
        more = "more than " if data.share < LEAST else ""
        factor = number(least / max(data.share, LEAST))
        verdict = f"the model prefers data, by a factor of {more}{factor}"
    else:
        verdict = "by this measure the model does not prefer data"
    left = ", ".join(f"{one.images} {one.share:.1%}" for one in (data, *others))
    return f"share of the variance that is left, with z in the cube: {left}: {verdict}"


def _numbers(own: Reconstructed) -> dict[str, Any]:
    cube = own.one(TRAINED, HELD_OUT, inside=True)
    return {
        "run": str(own.run.path),
        "name": own.run.name,
        "variance": cube.variance,
        "reconstructions": [
            {
                "images": one.images,
                "network": one.network,
                "inside": one.inside,
                **_values(one),
                "errors": one.inverse.error.tolist(),
                "course": one.inverse.course.double().mean(1).tolist(),
            }
            for one in own.found
        ],
        "baselines": {name: errors.mean().item() for name, errors in _baselines(own).items()},
        "nearest_errors": own.neighbour_error.tolist(),
        "principal": own.principal.mean(1).tolist(),
        "components_needed": components_needed(own.principal, cube.inverse.error.mean().item()),
    }


def draw(found: Sequence[Reconstructed]) -> Figure:
    """For each run rows of images, and beside them errors over the iterations and components.

    Raises:
        ImportError: matplotlib is not installed.
    """
    blocks = []
    for own in found:
        rows = _rows(own)
        images = sum(map(len, rows)) * (CELL + BETWEEN) + (len(rows) - 1) * APART
        height = max(images, 2 * PANEL_HEIGHT + PANEL_BELOW + 0.2)
        blocks.append((HEADER + height + AFTER, partial(_draw_run, own, rows)))
    return page(
        "Held-out images, and the nearest that a chain ends at",
        "x = M(z), the steps of training without noise; z by descent on |x − M(z)|² after t "
        "iterations; cut to [-1, 1] for display",
        blocks,
        width=WIDTH,
    )


Rows = list[tuple[str, Tensor]]
"""Labels, and images."""


def _rows(own: Reconstructed) -> list[Rows]:
    """The rows of a run, in groups that lie apart."""
    cube, free = (own.one(TRAINED, HELD_OUT, inside=inside) for inside in (True, False))
    fresh = own.one(UNTRAINED, HELD_OUT, inside=True)
    stages = [
        (f"t = {stage}{', z in the cube' if stage else ''}", images)
        for stage, images in zip(STAGES, cube.inverse.stages, strict=True)
    ]
    first = [
        (HELD_OUT, cube.target),
        *stages,
        (f"t = {STAGES[-1]}, z free", free.inverse.x),
        ("untrained, in the cube", fresh.inverse.x),
        ("nearest training image", own.neighbours),
    ]
    controls = [own.one(TRAINED, name, inside=True) for name in (PERMUTED, NOISE)]
    groups = [first, *([(o.images, o.target), ("z in the cube", o.inverse.x)] for o in controls)]
    return [[(label, images[:SHOWN]) for label, images in group] for group in groups]


def _draw_run(own: Reconstructed, rows: Sequence[Rows], canvas: Canvas, y: float) -> None:
    canvas.write(SIDE, y + 0.1, describe(own.run), fontsize=10, ha="left")
    y += HEADER
    lower = y + PANEL_HEIGHT + PANEL_BELOW
    _draw_courses(canvas.axes(PANEL_LEFT, y, PANEL_WIDTH, PANEL_HEIGHT), own)
    _draw_components(canvas.axes(PANEL_LEFT, lower, PANEL_WIDTH, PANEL_HEIGHT), own)
    for group in rows:
        y = APART + show_rows(canvas, LABEL, y, group, CELL)


def _draw_courses(axes: Axes, own: Reconstructed) -> None:
    for network, images, colour in CURVES:
        for inside in (True, False):
            one = own.one(network, images, inside=inside)
            label = (images if network == TRAINED else "untrained") if inside else None
            shares = (one.inverse.course.double().mean(1) / one.variance).tolist()
            style = "-" if inside else "--"
            axes.plot(shares, color=colour, ls=style, lw=1.4, label=label)
    axes.set_xlim(0, STAGES[-1])
    _finish(axes, own, "error, of variance; dashed: z free", "iteration t")
    axes.set_ylim(bottom=LEAST)
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def _draw_components(axes: Axes, own: Reconstructed) -> None:
    one = own.one(TRAINED, HELD_OUT, inside=True)
    shares = (own.principal.mean(1) / one.variance).tolist()
    shown = [share for share in shares if share > LEAST]
    axes.plot(shown, color=DARK, lw=1.4, label="principal components")
    axes.axhline(one.share, color=COLOURS[0], lw=1.4, label="z in the cube")
    axes.set_xlim(left=0)
    words = f"principal components, of {own.neighbours[0].numel():,}"
    _finish(axes, own, "error, of variance, of held-out images", words)
    axes.legend(fontsize=7, frameon=False, loc="lower left")


def _finish(axes: Axes, own: Reconstructed, title: str, xlabel: str) -> None:
    variance = own.one(TRAINED, HELD_OUT, inside=True).variance
    near = own.neighbour_error.mean().item() / variance
    axes.axhline(near, color=DARK, lw=1, ls=":", label="nearest training image")
    axes.set_yscale("log")
    plain(axes, title, xlabel)
