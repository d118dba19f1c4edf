"""Figure "likelihood": bits per dimension of held-out images by the short run as a flow.

Nijkamp et al. (2019), author response: 4.12 of 16 images of CIFAR-10, "rough, preliminary"; with
what such a number hides beside it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.likelihood import Gaussian

from ..plots.canvas import COLOURS, DARK
from ..plots.page import SIDE, page, plain, show_rows
from ..shortrun.flow import density as of_flow
from ..shortrun.network import EnergyNet
from ..shortrun.trained import TrainedRun
from . import shortrun
from .config import ShortRunFigure
from .shortrun_inverses import CUBE, FREE, search
from .study import ABOUT, Study, frame_of

STORED, NOISY, DEQUANTISED = "as stored", "training's noise", "dequantised"
OWN, DRAWN = "the flow's own", "drawn"
UNIFORM, PIXELS, GAUSSIAN = "uniform on the cube", "Gaussian, pixel by pixel", "Gaussian"
FLOW, ENTROPY = "flow", "entropy of the noise"
PALETTE = (*COLOURS, "#8C6D31")
"""Of the flows, in their order; the last is brown."""
SHOWN = 8
"""Images of a kind, at most."""


def bits(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Bits per dimension of held-out images, by every run's flow and by densities that are fitted.

    z is searched for with the network as it was trained, in float32; M(z), its distance from the
    image and all determinants are computed in float64.
    """
    count = config.count or 16
    shortrun.check_runs(runs, "likelihood", most=4, held_out=count)
    for run in runs:
        if run.settings.activation != "gelu":
            raise ConfigError(
                f"{run.path} has a network of {run.settings.activation}, which is piecewise "
                "linear: its Hessian is 0 wherever it exists, the determinants are all 1, and "
                "their product says nothing of volumes. Give a run of `ebmguard train shortrun "
                "--activation gelu`"
            )
    return frame_of([row for run in runs for row in _bits(run, count, config.seed)])


def _bits(run: TrainedRun, count: int, seed: int) -> list[dict[str, Any]]:
    data, noise = run.data, run.settings.data_noise
    generator = torch.Generator(run.device).manual_seed(seed)
    x = shortrun.some_of(run, data.test_x, generator, count)
    kinds = {STORED: x} | ({NOISY: shortrun.noisy(run, x, generator)} if noise else {})
    kinds[DEQUANTISED] = of_flow.dequantise(x, data.levels, generator)
    starts = run.starts(count, generator)
    rows = [
        _flow(run, name, z, kinds[name], search(run, exact(run), kinds[name], z).z)
        for name, z in ((STORED, FREE), *((name, CUBE) for name in kinds))
    ]
    rows.append(_flow(run, OWN, DRAWN, None, starts))
    uniform = torch.full((count,), math.log2(data.levels), dtype=torch.float64)
    # Noise leads out of the cube, where the uniform density is 0.
    rows.append({"density": UNIFORM, "images": STORED, **_spread(uniform)})
    if noise:
        train = data.scale(data.train_x)
        for name, independent in ((PIXELS, True), (GAUSSIAN, False)):
            density = Gaussian.fit(train, noise=noise, independent=independent)
            for kind, images in kinds.items():
                log_p = density.log_prob(images)
                own = of_flow.bits_per_dim(log_p, size=x[0].numel(), levels=data.levels)
                rows.append({"density": name, "images": kind, **_spread(own)})
        entropy = of_flow.noise_bits(noise, data.levels)
        rows.append({"density": ENTROPY, "images": NOISY, "mean": entropy})
    words = f"{count} held-out images, D = {x[0].numel():,}, levels 0..{data.levels}"
    named = {**shortrun.named(run), ABOUT: f"{shortrun.about(run)}; {words}"}
    return [{**named, **row} for row in rows]


def exact(run: TrainedRun) -> EnergyNet:
    """The network without rounding to bfloat16."""
    network = copy.deepcopy(run.network)
    network.autocast = None
    return network


def _flow(run: TrainedRun, name: str, where: str, x: Tensor | None, z: Tensor) -> dict[str, Any]:
    """The density at M(z), which is to be x; None: M(z) is the image itself."""
    steps, size = run.settings.sgld_steps, z[0].numel()
    found = of_flow.log_abs_det(
        exact(run).double(), z.double(), steps=steps, step_size=run.step_size
    )
    log_p = of_flow.extended_log_density(found.total, size=size)
    so_far = torch.cat([found.log_abs.new_zeros((1, len(z))), found.log_abs.cumsum(0)])
    so_far = (so_far / (size * math.log(2))).cpu()
    target = found.x if x is None else x
    misses = (found.x - target).square().flatten(1).mean(1).sqrt()
    within = of_flow.inside_cube(z)
    return {
        "density": FLOW,
        "images": name,
        "z": where,
        **_spread(of_flow.bits_per_dim(log_p, size=size, levels=run.data.levels)),
        "in_cube": within.double().mean().item(),
        "miss": misses.square().mean().sqrt().item(),
        "folded": int((found.flips > 0).sum()),
        "within": within.cpu().numpy(),
        "misses": misses.cpu().numpy(),
        "flips": found.flips.cpu().numpy(),
        "log2_det_per_dim": so_far.mean(1).numpy(),
        "course": so_far,
        "target": target.cpu(),
        "x": found.x.cpu(),
    }


def _spread(own: Tensor) -> dict[str, Any]:
    """NaN where one is NaN; infinite numbers count."""
    values = pd.Series(own.cpu().numpy())
    names = {"mean": "mean", "median": "median", "least": "min", "most": "max"}
    found = {name: getattr(values, how)(skipna=False) for name, how in names.items()}
    return {**found, "bits": values.to_numpy()}


def enough_bits(frame: pd.DataFrame) -> bool | None:
    """Whether no flow has fewer bits for images with noise than the noise itself has."""
    means = frame[frame["images"] == NOISY].set_index(["density", "path"])["mean"].astype(float)
    if ENTROPY not in means or means[FLOW].isna().any():
        return None
    return bool((means[FLOW] >= means[ENTROPY]).all())


def draw_bits(frame: pd.DataFrame, title: str) -> Figure:
    """For each run images beside M(z), bits per dimension, and how log|det| came about."""
    height, header = 3.05, 0.5

    def run(own: pd.DataFrame, canvas: Any, y: float) -> None:
        canvas.write(SIDE, y + 0.1, own[ABOUT].iloc[0], fontsize=10, ha="left")
        y += header
        flows = own[own["density"] == FLOW].to_dict("records")
        rows = [("held-out images", flows[1]["target"])]
        for flow in flows:
            if flow["images"] == NOISY:
                rows.append(("with training's noise", flow["target"]))
            if flow["images"] != DEQUANTISED:
                rows.append((f"M(z), z {flow['z']}", flow["x"]))
        shown = [(label, x[:SHOWN].float()) for label, x in rows]
        show_rows(canvas, 1.75, y, shown, 0.46)
        _draw_bits(canvas.axes(6.6, y, 3.5, height), own, flows)
        axes = canvas.axes(10.7, y, 2.75, height)
        for flow, colour in zip(flows, PALETTE, strict=False):
            axes.plot(flow["course"], color=colour, lw=0.4, alpha=0.35)
            axes.plot(flow["log2_det_per_dim"], color=colour, lw=1.6)
        axes.axhline(0, color=DARK, lw=0.6)
        axes.set_xlim(0, len(flows[0]["course"]) - 1)
        plain(axes, "log2|det| / D of the first k steps", "k; colours as on the left")

    words = (
        "p(M(z)) = p_0(z) / |det dM/dz|: density where the flow arrives, which is not at the image "
        "where M(z) misses it; images are cut to [-1, 1] for display"
    )
    blocks = [(header + height + 0.95, partial(run, own)) for own in shortrun.by_run(frame)]
    return page(title, words, blocks, width=13.7)


def _draw_bits(axes: Axes, own: pd.DataFrame, flows: list[dict[str, Any]]) -> None:
    means = own.set_index(["density", "images"])["mean"]
    for row, (one, colour) in enumerate(zip(flows, PALETTE, strict=False)):
        finite = np.isfinite(one["bits"])
        for within, face in ((True, colour), (False, "white")):
            chosen = one["bits"][finite & (one["within"] == within)]
            # Beside one another, always the same way: they would lie on one another.
            places = [row + 0.1 * (i % 5 - 2) for i in range(len(chosen))]
            axes.scatter(chosen, places, s=14, facecolors=face, edgecolors=colour, linewidths=0.8)
        for name, marker in ((PIXELS, "^"), (GAUSSIAN, "D")):
            if (name, one["images"]) in means.index:
                label = f"{name}, mean" if row == 0 else None
                style: dict[str, Any] = {"color": DARK, "ms": 6, "mfc": "none", "ls": "none"}
                axes.plot(means[name, one["images"]], row, marker, label=label, **style)
        if (ENTROPY, one["images"]) in means.index:
            level = [means[ENTROPY, NOISY]] * 2
            axes.plot(level, [row - 0.4, row + 0.4], color=DARK, lw=1.6, label=ENTROPY)
    axes.axvline(means[UNIFORM, STORED], color=DARK, lw=1, ls=":", label=UNIFORM)
    for face, label in ((DARK, "an image"), ("white", "z outside: likelihood 0")):
        axes.scatter([], [], s=14, facecolors=face, edgecolors=DARK, linewidths=0.8, label=label)
    labels = [f"{one['images']},\nz {one['z']}" for one in flows]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(flows) - 0.4, -0.6)
    place = (0.4, -0.08)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=place)
    plain(axes, "bits per dimension at M(z)")
    for tick, colour in zip(axes.get_yticklabels(), PALETTE, strict=False):
        tick.set_color(colour)


STUDIES = {
    "likelihood": Study(
        "Held-out images, and their density by the short run as a flow",
        "Nijkamp et al. (2019), author response: 4.12 bits for 16 images of CIFAR-10",
        shortrun.opened,
        bits,
        draw_bits,
        "p(x) = p_0(z) / |det dM/dz| with p_0 = U(-1, 1)^D and x = M(z), M the K steps of training "
        "without noise, in bits per dimension of images in 0..levels; fewer are better. Of the "
        "density at M(z), with 2^-D for p_0 wherever z is; where z is outside the cube the density "
        "is 0. in_cube: share of images whose z is there. miss: root mean square of M(z) - x: few "
        "bits with a miss that is not small are no likelihood of the image. folded: images on "
        "whose way a step turns space inside out; where M is not one-to-one, the bits are an upper "
        "bound. Dequantised: with uniform noise of one level's width, comparable with other "
        "papers' numbers. The flow's own: M(z) of z drawn of p_0. The Gaussians are fitted to the "
        "training images with the training's noise.",
        "images with the training's noise need no fewer bits than the noise alone",
        enough_bits,
    ),
}
