"""Held-out images and their densities: by a run's flow, and by densities that are simply fitted."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ebmguard.likelihood import Gaussian

from ..flow.invert import Inverse, first_guess, invert
from ..flow.likelihood import (
    bits_per_dim,
    dequantise,
    extended_log_density,
    inside_cube,
    noise_bits,
    uniform_bits,
)
from ..flow.logdet import log_abs_det
from .measured import noisy, some_of
from .several import enough_held_out

if TYPE_CHECKING:
    from ..trained import TrainedRun

STORED, NOISY, DEQUANTISED = "as stored", "training's noise", "dequantised"
OWN = "the flow's own"
UNIFORM, PIXELS, GAUSSIAN = "uniform on the cube", "Gaussian, pixel by pixel", "Gaussian"
Search = Callable[..., Inverse]


@dataclass(frozen=True)
class Flow:
    """Some images, and the density of what the flow made of them. All on the CPU.

    Attributes:
        images: held-out ones by what was done to them, STORED, NOISY or DEQUANTISED; or OWN, M(z)
            of z drawn of p_0.
        inside: whether z was kept in the cube.
        target: the images, (N, C, H, W).
        x: M(z), in float64.
        bits: bits per dimension at M(z), (N,) float64, with p_0 = 2^-D outside the cube too.
        within: whether z is in the cube, (N,): elsewhere the density at M(z) is 0.
        misses: root mean square of M(z) - x, (N,) float64, in units of a pixel in [-1, 1].
        flips: steps whose determinant is negative, (N,).
        course: log2 |det| / D of the first k steps, (K + 1, N) float64.
    """

    images: str
    inside: bool
    target: Tensor
    x: Tensor
    bits: Tensor
    within: Tensor
    misses: Tensor
    flips: Tensor
    course: Tensor

    @property
    def share_within(self) -> float:
        """Share of the images whose z is in the cube."""
        return self.within.double().mean().item()

    @property
    def miss(self) -> float:
        """Root mean square of M(z) - x over all images."""
        return self.misses.square().mean().sqrt().item()


@dataclass(frozen=True)
class Densities:
    """A run's held-out images with their densities.

    Attributes:
        run: the run.
        flows: by the flow: as stored with z free first, the others with z in the cube, and its own
            images last.
        fitted: bits per dimension, (N,) float64, by density (UNIFORM, PIXELS, GAUSSIAN) and by what
            was done to the images. The Gaussians need the training's noise, and are not there
            without it.
        noise: entropy of the training's noise in bits per dimension; None without noise.
    """

    run: TrainedRun
    flows: Sequence[Flow]
    fitted: Mapping[str, Mapping[str, Tensor]]
    noise: float | None

    def one(self, images: str, *, inside: bool = True) -> Flow:
        """The flow of one kind of images."""
        return next(own for own in self.flows if (own.images, own.inside) == (images, inside))


def measure(run: TrainedRun, *, count: int, seed: int, search: Search = invert) -> Densities:
    """Find z of held-out images and the densities there.

    z is searched for with the network as it was trained, in float32; M(z), its distance from the
    image and all determinants are computed in float64.

    Args:
        run: of a smooth network, whose chains start from noise.
        count: held-out images, drawn at random.
        seed: of the images' choice, the starts and the noise.
        search: finds z, as `invert` does.

    Raises:
        ConfigError: there are fewer test images.
    """
    data = run.data
    enough_held_out([run], count)
    generator = torch.Generator(run.device).manual_seed(seed)
    kinds = _kinds(run, some_of(run, data.test_x, generator, count), generator)
    starts = run.starts(count, generator)
    asked = [(STORED, False), *((name, True) for name in kinds)]
    flows = [_found(run, name, kinds[name], inside=inside, search=search) for name, inside in asked]
    flows.append(_flow(run, OWN, None, starts, inside=True))
    noise = run.settings.data_noise
    return Densities(
        run=run,
        flows=flows,
        fitted=_fitted(run, kinds),
        noise=noise_bits(noise, data.levels) if noise else None,
    )


def _kinds(run: TrainedRun, x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    kinds = {STORED: x}
    if run.settings.data_noise:
        kinds[NOISY] = noisy(run, x, generator)
    kinds[DEQUANTISED] = dequantise(x, run.data.levels, generator)
    return kinds


def _found(run: TrainedRun, name: str, x: Tensor, *, inside: bool, search: Search) -> Flow:
    network = copy.deepcopy(run.network)
    network.autocast = None
    inverse = search(
        network,
        x,
        steps=run.settings.sgld_steps,
        step_size=run.step_size,
        z0=first_guess(x),
        inside=inside,
    )
    return _flow(run, name, x, inverse.z, inside=inside)


def _flow(run: TrainedRun, name: str, x: Tensor | None, z: Tensor, *, inside: bool) -> Flow:
    """The density at M(z), which is to be x; None: M(z) is the image itself."""
    network = copy.deepcopy(run.network).double()
    network.autocast = None
    found = log_abs_det(network, z.double(), steps=run.settings.sgld_steps, step_size=run.step_size)
    size = found.x[0].numel()
    log_p = extended_log_density(found.total, size=size)
    so_far = torch.cat([found.log_abs.new_zeros((1, len(z))), found.log_abs.cumsum(0)])
    target = found.x if x is None else x
    return Flow(
        images=name,
        inside=inside,
        target=target.cpu(),
        x=found.x.cpu(),
        bits=bits_per_dim(log_p, size=size, levels=run.data.levels).cpu(),
        within=inside_cube(z).cpu(),
        misses=(found.x - target).square().flatten(1).mean(1).sqrt().cpu(),
        flips=found.flips.cpu(),
        course=(so_far / (size * math.log(2))).cpu(),
    )


def _fitted(run: TrainedRun, kinds: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    levels = run.data.levels
    x = kinds[STORED]
    uniform = torch.full((len(x),), uniform_bits(levels), dtype=torch.float64)
    # Noise leads out of the cube, where the uniform density is 0.
    fitted = {UNIFORM: {STORED: uniform}}
    noise = run.settings.data_noise
    if not noise:
        return fitted
    train = run.data.scale(run.data.train_x)
    for name, independent in ((PIXELS, True), (GAUSSIAN, False)):
        density = Gaussian.fit(train, noise=noise, independent=independent)
        fitted[name] = {
            kind: bits_per_dim(density.log_prob(images), size=x[0].numel(), levels=levels).cpu()
            for kind, images in kinds.items()
        }
    return fitted


def median(values: Tensor) -> float:
    """Of (N,) numbers, infinite ones among them; NaN where one is NaN."""
    return math.nan if bool(values.isnan().any()) else statistics.median(values.tolist())
