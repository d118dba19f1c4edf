"""Figures "reconstruction" and "likelihood": the K steps as a map M of noise to images.

Nijkamp et al. (2019), section 3.4, with the controls that tell what the error shows; and its author
response, 4.12 bits of 16 images of CIFAR-10, "rough, preliminary", with what such a number hides.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from torch import Tensor, nn

from ebmguard.errors import ConfigError

from ..likelihood import Gaussian
from ..plots.canvas import COLOURS, DARK, plain
from ..plots.numbers import NONE
from ..shortrun.flow import density as of_flow
from ..shortrun.flow.invert import ITERATIONS, Inverse, invert
from ..shortrun.network import EnergyNet
from ..shortrun.trained import TrainedRun
from . import shortrun
from .config import ShortRunFigure
from .measures import ROWS, nearest
from .study import ABOUT, Study

STAGES = (0, 5, 20, ITERATIONS)
"""Iterations whose images are shown."""
CONTROLS = 16
"""Images of each kind that is no data, and held-out images of the untrained network, at most."""
LEAST = 1e-5
"""As a share of the variance, what is left of an image that a descent has reached is rounding."""
HELD_OUT, PERMUTED, NOISE = "held-out images", "permuted pixels", "noise"
TRAINED, UNTRAINED, NEAREST = "trained", "untrained", "nearest training image"
CUBE, FREE = "in the cube", "free"
"""Where z is searched for."""
STORED, NOISY, DEQUANTISED = "as stored", "training's noise", "dequantised"
OWN, DRAWN = "the flow's own", "drawn"
FLOW, GAUSSIAN, UNIFORM = "flow", "Gaussian", "uniform on the cube"
ENTROPY = "entropy of the noise"
PALETTE = (*COLOURS, "#8C6D31")
"""Of the flows, in their order; the last is brown."""


def search(run: TrainedRun, f: nn.Module, x: Tensor, z: str, stages: Sequence[int] = ()) -> Inverse:
    """The z whose M(z) is nearest to x, by the fewest steps that the run trained with."""
    steps, size = run.settings.sgld_steps, run.step_size
    # From noise, where the paper begins, more descents end at another image than x.
    where = {"z0": x / 2, "inside": z == CUBE, "iterations": STAGES[-1]}
    return invert(f, x, steps=steps, step_size=size, stages=stages, **where)  # type: ignore[arg-type]


# -- reconstruction ---------------------------------------------------------------------------


def inverses(run: TrainedRun, count: int, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Held-out images, and images that are no data, with the nearest M(z), z in the cube and free.

    z is searched for from x / 2, by the trained network and by that of the run's seed.
    """
    data = run.data
    x = shortrun.some_of(run, data.test_x, generator, count)
    some, mean = x[:CONTROLS], data.scale(data.train_x.double().mean(0))
    order = torch.randperm(x[0].numel(), generator=generator, device=run.device)
    permuted = some.flatten(1)[:, order].reshape(some.shape)
    noise = run.starts(len(some), generator)
    sizes = [of.double().square().mean().item() for of in (x - mean, some - mean, noise)]
    targets = {HELD_OUT: (x, sizes[0]), PERMUTED: (permuted, sizes[1]), NOISE: (noise, sizes[2])}
    fresh = run.config.make_network(data).eval().requires_grad_(False)
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
                yield {
                    **_errors(images, network, found.error[part], size, z),
                    "outside": (found.z[part].abs() > 1).double().mean().item(),
                    "largest": found.z[part].abs().max().item(),
                    "course": found.course[:, part].double().mean(1).cpu().numpy(),
                    "target": target,
                    "stages": found.stages[:, part],
                }
    distance, place = nearest(x, data.train_x, data.levels)
    near = _errors(HELD_OUT, NEAREST, distance.double().square(), sizes[0])
    yield near | {"target": data.scale(data.train_x[place])}
    train = data.train_x[:ROWS].cpu().double().flatten(1).numpy() / (data.levels / 2) - 1
    flat = x.cpu().double().flatten(1).numpy()
    model = PCA(min(*train.shape, flat.shape[1] // 4), svd_solver="full").fit(train)
    for network, told in (
        (f"{model.n_components_} components", model.inverse_transform(model.transform(flat))),
        ("mean training image", model.mean_),
    ):
        errors = torch.from_numpy(np.square(told - flat).mean(1))
        yield _errors(HELD_OUT, network, errors, sizes[0])


def _errors(
    images: str, network: str, each: Tensor, variance: float, z: str = NONE
) -> dict[str, Any]:
    """Mean squared errors of images, (N,): their mean, and of the variance."""
    return {
        "images": images,
        "network": network,
        "z": z,
        "count": len(each),
        "error": each.mean().item(),
        "of_variance": each.mean().item() / variance,
        "variance": variance,
        "errors": each.cpu().numpy(),
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
    words = "z by descent on |x − M(z)|², M without noise, t iterations; cut to [-1, 1] for display"
    groups = shortrun.by_run(frame)
    figure, bands = shortrun.picture(title, words, [8.2] * len(groups), width=12)
    for band, own in zip(bands, groups, strict=True):
        rows = {(row["network"], row["images"], row["z"]): row for row in own.to_dict("records")}
        cube, free = rows[TRAINED, HELD_OUT, CUBE], rows[TRAINED, HELD_OUT, FREE]
        band.suptitle(own[ABOUT].iloc[0], fontsize=10)
        left, axes = band.subplots(1, 2, width_ratios=(1.6, 1))
        stages = zip(STAGES, cube["stages"], strict=True)
        shown = [
            (HELD_OUT, cube["target"]),
            *((f"t = {t}{', z in the cube' if t else ''}", images) for t, images in stages),
            (f"t = {STAGES[-1]}, z free", free["stages"][-1]),
            ("untrained, in the cube", rows[UNTRAINED, HELD_OUT, CUBE]["stages"][-1]),
            (NEAREST, rows[NEAREST, HELD_OUT, NONE]["target"]),
        ]
        for kind in (PERMUTED, NOISE):
            one = rows[TRAINED, kind, CUBE]
            shown += [(kind, one["target"]), ("z in the cube", one["stages"][-1])]
        shortrun.strip(left, [(label, images[:10]) for label, images in shown])
        for colour, images in zip(COLOURS, (HELD_OUT, PERMUTED, NOISE, UNTRAINED), strict=True):
            of = (UNTRAINED, HELD_OUT) if images == UNTRAINED else (TRAINED, images)
            for z, dashes, label in ((CUBE, "-", images), (FREE, "--", None)):
                shares = rows[*of, z]["course"] / rows[*of, z]["variance"]
                axes.plot(shares, color=colour, ls=dashes, lw=1.4, label=label)
        baselines = own[own["z"] == NONE][["network", "of_variance"]].to_numpy()
        for (label, level), dashes in zip(baselines, (":", "-.", "--"), strict=True):
            axes.axhline(level, color=DARK, lw=1.2, ls=dashes, label=label)
        axes.set(yscale="log", xlim=(0, STAGES[-1]), ylim=(LEAST, None))
        axes.set_box_aspect(1.2)
        axes.legend(
            fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1)
        )
        plain(axes, "error, of variance; dashed: z free", "iteration t")
    return figure


# -- likelihood -------------------------------------------------------------------------------


def bits(runs: Sequence[TrainedRun], config: ShortRunFigure) -> pd.DataFrame:
    """Bits per dimension of held-out images, by every run's flow and by densities that are fitted.

    z is searched for with the network as it was trained, in float32; M(z), its distance from the
    image and all determinants are computed in float64.
    """
    for run in runs:
        if run.settings.activation != "gelu":
            raise ConfigError(
                f"{run.path} has a network of {run.settings.activation}, whose Hessian is 0 "
                "wherever it exists: the determinants are all 1 and say nothing of volumes. Give a "
                "run of `ebmguard train shortrun --activation gelu`"
            )
    return shortrun.each(runs, config, _bits, 16, most=4, held_out=True)


def _bits(run: TrainedRun, count: int, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    data, noise = run.data, run.settings.data_noise
    x = shortrun.some_of(run, data.test_x, generator, count)
    kinds = {STORED: x} | ({NOISY: shortrun.noisy(run, x, generator)} if noise else {})
    kinds[DEQUANTISED] = of_flow.dequantise(x, data.levels, generator)
    starts, size = run.starts(count, generator), x[0].numel()
    words = f"{count} held-out images, D = {size:,}, levels 0..{data.levels}"
    about = {ABOUT: f"{shortrun.about(run)}; {words}"}
    for name, z in ((STORED, FREE), *((name, CUBE) for name in kinds)):
        found = search(run, exact(run), kinds[name], z).z
        yield about | flow_bits(run, name, z, kinds[name], found)
    yield about | flow_bits(run, OWN, DRAWN, None, starts)
    # Noise leads out of the cube, where the uniform density is 0.
    uniform = np.full(count, math.log2(data.levels))
    yield about | {"density": UNIFORM, "images": STORED, "mean": uniform.mean(), "bits": uniform}
    if noise:
        density = Gaussian.fit(data.scale(data.train_x), noise=noise, independent=False)
        for kind, images in kinds.items():
            log_p = density.log_prob(images)
            own = of_flow.bits_per_dim(log_p, size=size, levels=data.levels).cpu().numpy()
            yield about | {"density": GAUSSIAN, "images": kind, "mean": own.mean(), "bits": own}
        entropy = of_flow.noise_bits(noise, data.levels)
        yield about | {"density": ENTROPY, "images": NOISY, "mean": entropy}


def exact(run: TrainedRun) -> EnergyNet:
    """The network without rounding to bfloat16."""
    network = copy.deepcopy(run.network)
    network.autocast = None
    return network


def flow_bits(
    run: TrainedRun, name: str, where: str, x: Tensor | None, z: Tensor
) -> dict[str, Any]:
    """The density at M(z), which is to be x; None: M(z) is the image itself."""
    steps, size = run.settings.sgld_steps, z[0].numel()
    found = of_flow.log_abs_det(
        exact(run).double(), z.double(), steps=steps, step_size=run.step_size
    )
    log_p = of_flow.extended_log_density(found.total, size=size)
    own = of_flow.bits_per_dim(log_p, size=size, levels=run.data.levels).cpu().numpy()
    so_far = torch.cat([found.log_abs.new_zeros((1, len(z))), found.log_abs.cumsum(0)])
    so_far = (so_far / (size * math.log(2))).cpu()
    target = found.x if x is None else x
    misses = (found.x - target).square().flatten(1).mean(1).sqrt()
    within = of_flow.inside_cube(z)
    return {
        "density": FLOW,
        "images": name,
        "z": where,
        "mean": own.mean(),
        "bits": own,
        "in_cube": within.double().mean().item(),
        "miss": misses.square().mean().sqrt().item(),
        "folded": int((found.flips > 0).sum()),
        "within": within.cpu().numpy(),
        "misses": misses.cpu().numpy(),
        "log2_det_per_dim": so_far.mean(1).numpy(),
        "course": so_far,
        "target": target.cpu(),
        "x": found.x.cpu(),
    }


def enough_bits(frame: pd.DataFrame) -> bool | None:
    """Whether no flow has fewer bits for images with noise than the noise itself has."""
    means = frame[frame["images"] == NOISY].set_index(["density", "path"])["mean"].astype(float)
    if ENTROPY not in means or means[FLOW].isna().any():
        return None
    return bool((means[FLOW] >= means[ENTROPY]).all())


def draw_bits(frame: pd.DataFrame, title: str) -> Figure:
    """For each run images beside M(z), bits per dimension, and how log|det| came about."""
    words = (
        "density where the flow arrives, which is not at the image where M(z) misses it; images "
        "are cut to [-1, 1] for display\nhollow: z outside of the cube, likelihood 0; ◇: mean of "
        "the Gaussian; upright: entropy of the noise; dotted: uniform density on the cube"
    )
    groups = shortrun.by_run(frame)
    figure, bands = shortrun.picture(title, words, [4.4] * len(groups), width=13.7)
    for band, own in zip(bands, groups, strict=True):
        band.suptitle(own[ABOUT].iloc[0], fontsize=10)
        images, middle, right = band.subplots(1, 3, width_ratios=(1.4, 1.3, 1))
        means = own.set_index(["density", "images"])["mean"]
        flows = own[own["density"] == FLOW].to_dict("records")
        shown = [("held-out images", flows[1]["target"])]
        for row, (flow, colour) in enumerate(zip(flows, PALETTE, strict=False)):
            kind = flow["images"]
            if kind == NOISY:
                shown.append(("with training's noise", flow["target"]))
            if kind != DEQUANTISED:
                shown.append((f"M(z), z {flow['z']}", flow["x"]))
            # Beside one another, always the same way: they would lie on one another.
            places = row + 0.1 * (np.arange(len(flow["bits"])) % 5 - 2)
            face = np.where(flow["within"], colour, "white")
            middle.scatter(flow["bits"], places, 14, facecolors=face, edgecolors=colour, lw=0.8)
            for name, marker, size in ((GAUSSIAN, "D", 6), (ENTROPY, "|", 30)):
                if (name, kind) in means.index:
                    style = {"color": DARK, "ms": size, "mew": 1.4, "mfc": "none"}
                    middle.plot(means[name, kind], row, marker, **style)
            right.plot(flow["course"], color=colour, lw=0.4, alpha=0.35)
            right.plot(flow["log2_det_per_dim"], color=colour, lw=1.6)
        shortrun.strip(images, [(label, x[:8].float()) for label, x in shown])
        middle.axvline(means[UNIFORM, STORED], color=DARK, lw=1, ls=":")
        middle.set_yticks(range(len(flows)), [f"{one['images']},\nz {one['z']}" for one in flows])
        middle.set_ylim(len(flows) - 0.4, -0.6)
        plain(middle, "bits per dimension at M(z)")
        for tick, colour in zip(middle.get_yticklabels(), PALETTE, strict=False):
            tick.set_color(colour)
        right.axhline(0, color=DARK, lw=0.6)
        right.set_xlim(0, len(flows[0]["course"]) - 1)
        plain(right, "log2|det| / D of the first k steps", "k; colours as on the left")
    return figure


STUDIES = {
    "reconstruction": Study(
        "Held-out images, and the nearest that a chain ends at",
        "Nijkamp et al. (2019), section 3.4",
        shortrun.opened,
        partial(shortrun.each, rows=inverses, count=64, most=4, held_out=True),
        draw_inverses,
        "z minimises |x - M(z)|², M the K steps of training without noise, from z = x / 2. error: "
        "mean squared error per pixel and channel of images in [-1, 1]. "
        "of_variance: over the mean squared difference from the mean training image (of noise: "
        "from 0). outside, largest: share of z's entries outside [-1, 1], where no chain starts, "
        "and the largest |z|. Permuted: one order of pixels for all held-out images. Components: "
        "principal ones of training images. Untrained: the network as its seed initialises it; "
        "with z free, a map that has learned nothing reaches almost any image too.",
        "of data less of the variance is left, with z in the cube, than of other images",
        prefers_data,
    ),
    "likelihood": Study(
        "Held-out images, and their density by the short run as a flow",
        "Nijkamp et al. (2019), author response: 4.12 bits for 16 images of CIFAR-10",
        shortrun.opened,
        bits,
        draw_bits,
        "p(x) = p_0(z) / |det dM/dz|, p_0 = U(-1, 1)^D, x = M(z), M the K steps without noise: in "
        "bits per dimension of images in 0..levels, with 2^-D for p_0 outside the cube too, where "
        "it is 0. in_cube: share of images whose z is inside. miss: root mean square of M(z) - x: "
        "few bits with a miss that is not small are no likelihood of the image. folded: images on "
        "whose way a step turns space inside out; where M is not one-to-one, the bits are an upper "
        "bound. Dequantised: with uniform noise of one level's width, comparable with other "
        "papers' numbers. The flow's own: M(z) of z drawn of p_0. The Gaussian is fitted to the "
        "training images with the training's noise.",
        "images with the training's noise need no fewer bits than the noise alone",
        enough_bits,
    ),
}
