"""Figure "likelihood": bits per dimension of held-out images by the short run as a flow.

Nijkamp et al. (2019), author response; with what such a number hides beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ebmguard.errors import ConfigError

from ...plots.canvas import COLOURS, DARK, Canvas
from ...plots.figure import Made
from ...plots.markdown import NONE, markdown_table
from ...plots.numbers import number
from ...plots.page import SIDE, page, plain, show_rows
from .config import FigureConfig
from .densities import (
    DEQUANTISED,
    GAUSSIAN,
    NOISY,
    OWN,
    PIXELS,
    STORED,
    UNIFORM,
    Densities,
    Flow,
    measure,
    median,
)
from .measured import describe
from .several import at_most, enough_held_out, from_noise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..trained import TrainedRun

COUNT = 16
"""Held-out images of each run, as many as the authors'."""
MOST_RUNS = 4
PUBLISHED = 4.12
"""The authors' bits per dimension of 16 images of CIFAR-10, "rough, preliminary"."""
PALETTE = (*COLOURS, "#8C6D31")
"""Of the flows, in their order; the last is brown."""
SHOWN = 8
"""Images of a kind, at most."""
MARKS = ((PIXELS, "^"), (GAUSSIAN, "D"))
"""Fitted densities, and how their means are drawn."""
# All in inches.
WIDTH = 13.7
LABEL, CELL = 1.75, 0.46
HEADER, PANEL_HEIGHT, BELOW = 0.5, 3.05, 0.95
STRIP_LEFT, STRIP_WIDTH = 6.6, 3.5
COURSE_LEFT, COURSE_WIDTH = 10.7, 2.75

LEGEND = (
    "p(x) = p_0(z) / |det dM/dz| with p_0 = U(-1, 1)^D and x = M(z), M the K steps of training "
    "without noise, in bits per dimension of images in 0..levels: 1 + log2|det dM/dz| / D + "
    "log2(levels / 2). Fewer are better. Mean, median, least and most over the images. They are "
    "of the density at M(z), with 2^-D for p_0 wherever z is; where z is outside the cube the "
    "density is 0. In the cube: share of images whose z is there. Miss: root mean square of "
    "M(z) - x, with pixels in [-1, 1]. Folded: images on whose way a step turns space inside out. "
    "Images: as stored (points of a lattice, where a density may be as large as it likes); with "
    "the training's noise added; dequantised (uniform noise of one level's width: where M(z) = x, "
    "the mean bits are those that a lossless code needs at most, and comparable with other papers' "
    "numbers); and the flow's own, M(z) of z drawn of p_0, whose mean is the flow's entropy as "
    "long as M is one-to-one. Gaussian, and Gaussian pixel by pixel: fitted to the training images "
    "with the training's noise. Entropy of the noise: no density needs fewer bits of images with "
    "that noise in expectation."
)
MEANING = (
    "What it shows: the volume of the starts around z that end around M(z). A flow that contracts "
    "has a large density where it arrives, and none beside: few bits with a miss that is not small "
    "are no likelihood of the image. Where M is not one-to-one, other starts may add to the "
    "density at M(z), and the bits are an upper bound. The noise of the chain is left out, as the "
    "authors left it out."
)


def make(runs: Sequence[TrainedRun], config: FigureConfig) -> Made:
    """Bits per dimension of held-out images, by every run.

    Args:
        runs: of GELU networks, with chains that start from noise.
        config: `count` is the number of held-out images.

    Raises:
        ConfigError: a network is piecewise linear, a run's chains go on from update to update,
            there are more runs than the picture has room for, or fewer test images than are asked
            for.
        ImportError: matplotlib is not installed.
    """
    at_most(runs, MOST_RUNS)
    from_noise(runs, "Figure likelihood")
    for run in runs:
        check_smooth(run)
    count = config.count or COUNT
    enough_held_out(runs, count)
    found = [measure(run, count=count, seed=config.seed) for run in runs]
    said = [sentence for own in found for sentence in statements(own)]
    text = "\n\n".join([LEGEND, *map(table, found), "\n".join([*said, MEANING])])
    return Made(draw(found), text, {"runs": list(map(_numbers, found)), "statements": said})


def check_smooth(run: TrainedRun) -> None:
    """Refuse a network without second derivatives.

    Raises:
        ConfigError: its activation is piecewise linear.
    """
    if run.settings.activation != "gelu":
        raise ConfigError(
            f"{run.path} has a network of {run.settings.activation}, which is piecewise linear: "
            "its Hessian is 0 wherever it exists, the determinants are all 1, and their product "
            "says nothing of volumes. Give a run of `ebmguard train shortrun --activation gelu`"
        )


def table(own: Densities) -> str:
    """A run's bits: a line for each kind of images by the flow, and by each fitted density."""
    head = ["density", "images", "mean", "median", "least", "most"]
    head += ["in the cube", "miss", "folded"]
    rows = [
        [
            f"flow, z {_where(one)}",
            one.images,
            *_spread(one.bits),
            f"{one.share_within:.0%}",
            number(one.miss),
            f"{int((one.flips > 0).sum())} of {len(one.flips)}",
        ]
        for one in own.flows
    ]
    rows += [
        [name, images, *_spread(bits), *[NONE] * 3]
        for name, by_images in own.fitted.items()
        for images, bits in by_images.items()
    ]
    if own.noise is not None:
        rows.append(["entropy of the noise", NOISY, f"{own.noise:.2f}", *[NONE] * 6])
    count = len(own.flows[0].bits)
    size = own.flows[0].target[0].numel()
    said = f"{describe(own.run)}; {count} held-out images, D = {size:,}, "
    said += f"levels 0..{own.run.data.levels}"
    return f"{said}\n\n{markdown_table(head, rows, words=2)}"


def _where(one: Flow) -> str:
    if one.images == OWN:
        return "drawn"
    return "in the cube" if one.inside else "free"


def _spread(bits: Tensor) -> list[str]:
    values = (bits.mean().item(), median(bits), bits.min().item(), bits.max().item())
    return [f"{value:.2f}" if abs(value) < 1e6 else number(value) for value in values]


def statements(own: Densities) -> list[str]:
    """Sentences that follow from a run's numbers."""
    said = [_free(own), _missed(own), _against_gaussian(own), _own(own)]
    if own.noise is not None:
        said.append(_against_noise(own, own.noise))
    if own.run.data.name == "cifar10":
        said.append(
            f"the authors' number is {PUBLISHED}, of 16 images; they do not state the unit's "
            "conversion, whether z was in the cube, how far M(z) was from the image, nor noise"
        )
    return [f"{own.run.name}: {sentence}." for sentence in said]


def _free(own: Densities) -> str:
    one = own.one(STORED, inside=False)
    within = int(one.within.sum())
    told = f"with z free it is in the cube for {within} of {len(one.within)} images"
    if within == len(one.within):
        return told
    inner = f" ({one.bits[one.within].mean().item():.2f} bits)" if within else ""
    beyond = one.bits[~one.within].mean().item()
    return (
        f"{told}{inner}; the likelihood of the others is 0, unless another z leads there, and "
        f"{beyond:.2f} bits are what it would be if p_0 went on outside"
    )


def _missed(own: Densities) -> str:
    one = own.one(STORED)
    noise = own.run.settings.data_noise
    told = (
        f"with z in the cube the mean is {one.bits.mean().item():.2f} bits per dimension at M(z), "
        f"{number(one.miss)} from the images as stored"
    )
    if not noise:
        return told
    if one.miss > noise:
        return (
            f"{told}, farther than the {noise:g} of the training's noise: it is not the density "
            "of these images"
        )
    return f"{told}, within the {noise:g} of the training's noise"


def _against_gaussian(own: Densities) -> str:
    one = own.one(DEQUANTISED)
    bits = one.bits.mean().item()
    told = f"of dequantised images it is {bits:.2f}, {number(one.miss)} from them"
    if bits < 0:
        told += " (no lossless code needs less than nothing: it is no likelihood of the images)"
    if GAUSSIAN not in own.fitted:
        return told
    reference = own.fitted[GAUSSIAN][DEQUANTISED].mean().item()
    return f"{told}; a Gaussian, which is at the images themselves, has {reference:.2f}"


def _own(own: Densities) -> str:
    mean = own.one(OWN).bits.mean().item()
    told = (
        f"the flow's own images, where its density is that of the image, have {mean:.2f}: its "
        "entropy as long as it is one-to-one, and else an upper bound"
    )
    if own.noise is not None and mean < own.noise:
        told += (
            f"; less than the {own.noise:.2f} of the training's noise alone, so that they are not "
            "distributed as the images that it was trained with"
        )
    return told


def _against_noise(own: Densities, noise: float) -> str:
    one = own.one(NOISY)
    bits = one.bits.mean().item()
    told = (
        f"of images with the training's noise it is {bits:.2f}, {number(one.miss)} from them; the "
        f"noise alone has {noise:.2f}"
    )
    if bits < noise:
        return (
            f"{told}: fewer bits than any density has there in expectation, so that these are no "
            "likelihoods of the images"
        )
    return told


def _numbers(own: Densities) -> dict[str, Any]:
    return {
        "run": str(own.run.path),
        "name": own.run.name,
        "dimensions": own.flows[0].target[0].numel(),
        "levels": own.run.data.levels,
        "flows": [
            {
                "images": one.images,
                "inside": one.inside,
                "mean": one.bits.mean().item(),
                "median": median(one.bits),
                "share_within": one.share_within,
                "miss": one.miss,
                "bits": one.bits.tolist(),
                "within": one.within.tolist(),
                "misses": one.misses.tolist(),
                "flips": one.flips.tolist(),
                "log2_det_per_dim": one.course.mean(1).tolist(),
            }
            for one in own.flows
        ],
        "fitted": {
            name: {images: bits.mean().item() for images, bits in by_images.items()}
            for name, by_images in own.fitted.items()
        },
        "noise_bits": own.noise,
    }


def draw(found: Sequence[Densities]) -> Figure:
    """For each run images beside M(z), bits per dimension, and how log|det| came about.

    Raises:
        ImportError: matplotlib is not installed.
    """
    height = HEADER + PANEL_HEIGHT + BELOW
    return page(
        "Held-out images, and their density by the short run as a flow",
        "p(M(z)) = p_0(z) / |det dM/dz|: density where the flow arrives, which is not at the image "
        "where M(z) misses it; images are cut to [-1, 1] for display",
        [(height, partial(_draw_run, own)) for own in found],
        width=WIDTH,
    )


def _draw_run(own: Densities, canvas: Canvas, y: float) -> None:
    canvas.write(SIDE, y + 0.1, describe(own.run), fontsize=10, ha="left")
    y += HEADER
    free, cube = own.one(STORED, inside=False), own.one(STORED)
    rows = [
        ("held-out images", cube.target),
        ("M(z), z free", free.x),
        ("M(z), z in the cube", cube.x),
    ]
    if own.noise is not None:
        noisy = own.one(NOISY)
        rows += [("with training's noise", noisy.target), ("M(z), z in the cube", noisy.x)]
    rows.append(("M(z), z drawn", own.one(OWN).x))
    shown = [(label, images[:SHOWN].float()) for label, images in rows]
    show_rows(canvas, LABEL, y, shown, CELL)
    _draw_bits(canvas.axes(STRIP_LEFT, y, STRIP_WIDTH, PANEL_HEIGHT), own)
    _draw_course(canvas.axes(COURSE_LEFT, y, COURSE_WIDTH, PANEL_HEIGHT), own)


def _draw_bits(axes: Axes, own: Densities) -> None:
    for row, (one, colour) in enumerate(zip(own.flows, PALETTE, strict=False)):
        finite = one.bits.isfinite()
        for within, face in ((True, colour), (False, "white")):
            chosen = one.bits[finite & (one.within == within)].tolist()
            # Beside one another, always the same way: they would lie on one another.
            places = [row + 0.1 * (i % 5 - 2) for i in range(len(chosen))]
            axes.scatter(chosen, places, s=14, facecolors=face, edgecolors=colour, linewidths=0.8)
        for name, marker in MARKS:
            if one.images in own.fitted.get(name, {}):
                mean = own.fitted[name][one.images].mean().item()
                label = f"{name}, mean" if row == 0 else None
                axes.plot(mean, row, marker, color=DARK, ms=6, mfc="none", ls="none", label=label)
        if one.images == NOISY and own.noise is not None:
            ends = [row - 0.4, row + 0.4]
            axes.plot([own.noise] * 2, ends, color=DARK, lw=1.6, label="entropy of the noise")
    uniform = own.fitted[UNIFORM][STORED][0].item()
    axes.axvline(uniform, color=DARK, lw=1, ls=":", label=UNIFORM)
    for face, label in ((DARK, "an image"), ("white", "z outside: likelihood 0")):
        axes.scatter([], [], s=14, facecolors=face, edgecolors=DARK, linewidths=0.8, label=label)
    labels = [f"{one.images},\nz {_where(one)}" for one in own.flows]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(own.flows) - 0.4, -0.6)
    place = (0.4, -0.08)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=place)
    plain(axes, "bits per dimension at M(z)")
    for tick, colour in zip(axes.get_yticklabels(), PALETTE, strict=False):
        tick.set_color(colour)


def _draw_course(axes: Axes, own: Densities) -> None:
    for one, colour in zip(own.flows, PALETTE, strict=False):
        axes.plot(one.course.tolist(), color=colour, lw=0.4, alpha=0.35)
        axes.plot(one.course.mean(1).tolist(), color=colour, lw=1.6)
    axes.axhline(0, color=DARK, lw=0.6)
    axes.set_xlim(0, len(own.flows[0].course) - 1)
    plain(axes, "log2|det| / D of the first k steps", "k; colours as on the left")
