"""Figure "reconstruction": held-out images, and the nearest to them that a chain can end at.

Nijkamp et al. (2019), section 3.4, with the controls that tell what the error shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...plots.markdown import NONE, markdown_table
from .config import FigureConfig
from .made import Made
from .measured import describe
from .principal import components_needed
from .reconstructed import (
    HELD_OUT,
    NOISE,
    PERMUTED,
    TRAINED,
    UNTRAINED,
    Reconstructed,
    Reconstruction,
    reconstruct,
)
from .reconstruction_picture import LEAST, draw
from .several import at_most, enough_held_out, from_noise, number

if TYPE_CHECKING:
    from ..trained import TrainedRun

COUNT = 64
"""Held-out images of each run."""
MOST_RUNS = 4
CONVERGED = 0.05
"""The descent counts as over where the last tenth of it took less than this share of the error."""

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


def table(own: Reconstructed) -> str:
    """A run's errors: a line for each kind of images and network, and for each baseline."""
    head = ["images", "reached by", "number", "error", "±", "of variance", "PCA"]
    head += ["outside", "largest", "falling"]
    rows = [_row(own, one) for one in own.found]
    variance = own.one(TRAINED, HELD_OUT, inside=True).variance
    for name, errors in _baselines(own).items():
        error = errors.mean().item()
        cells = [HELD_OUT, name, str(len(errors)), number(error), number(_standard_error(errors))]
        rows.append([*cells, f"{error / variance:.1%}", _components(own, error), *[NONE] * 3])
    return f"{describe(own.run)}\n\n{markdown_table(head, rows, words=2)}"


def _row(own: Reconstructed, one: Reconstruction) -> list[str]:
    errors = one.inverse.error
    error = errors.mean().item()
    return [
        one.images,
        f"{one.network}, z {_where(one)}",
        str(len(errors)),
        number(error),
        number(_standard_error(errors)),
        f"{one.share:.1%}",
        _components(own, error) if one.images == HELD_OUT else NONE,
        f"{one.outside:.1%}",
        number(one.largest),
        f"{one.still_falling:.1%}",
    ]


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


def _standard_error(errors: Tensor) -> float:
    count = len(errors)
    return errors.double().std().item() / math.sqrt(count) if count > 1 else math.nan


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
                "error": one.inverse.error.mean().item(),
                "standard_error": _standard_error(one.inverse.error),
                "of_variance": one.share,
                "outside": one.outside,
                "largest": one.largest,
                "still_falling": one.still_falling,
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
