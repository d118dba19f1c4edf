"""Images and what a short-run model makes of them when it is asked for the nearest that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..flow.invert import ITERATIONS, Inverse, first_guess, invert
from .measured import some_of
from .nearest import nearest
from .principal import principal_errors
from .several import enough_held_out

if TYPE_CHECKING:
    from ..network import EnergyNet
    from ..trained import TrainedRun

STAGES = (0, 5, 20, ITERATIONS)
"""Iterations whose images are kept."""
CONTROLS = 16
"""Images of each kind that is no data, and held-out images of the untrained network, at most."""
HELD_OUT, PERMUTED, NOISE = "held-out images", "permuted pixels", "noise"
TRAINED, UNTRAINED = "trained", "untrained"


@dataclass(frozen=True)
class Reconstruction:
    """Images of one kind, reconstructed by one network.

    Attributes:
        network: "trained", or "untrained": at the run's initialisation.
        images: which kind they are.
        inside: whether z was kept in [-1, 1].
        target: the images, (N, C, H, W).
        inverse: what was found.
        variance: mean squared difference of the images' entries from the mean image of their kind.
    """

    network: str
    images: str
    inside: bool
    target: Tensor
    inverse: Inverse
    variance: float

    @property
    def share(self) -> float:
        """The error as a share of the images' variance: of an image by itself that of the mean."""
        return self.inverse.error.mean().item() / self.variance

    @property
    def outside(self) -> float:
        """Share of z's entries outside [-1, 1]."""
        return (self.inverse.z.abs() > 1).double().mean().item()

    @property
    def largest(self) -> float:
        """The largest |z|."""
        return self.inverse.z.abs().max().item()

    @property
    def still_falling(self) -> float:
        """How much of the mean error the last tenth of the iterations took away."""
        means = self.inverse.course.double().mean(1)
        before = means[-1 - len(means) // 10]
        return (1 - means[-1] / before).item() if before > 0 else 0.0


@dataclass(frozen=True)
class Reconstructed:
    """A run's reconstructions, and what they are held against.

    Attributes:
        run: the run.
        found: reconstructions: of held-out images by the trained network first, in the cube and
            free, and the others after them.
        neighbours: the nearest training image of each held-out image, (N, C, H, W).
        neighbour_error: mean squared error of it, (N,) float64 on the CPU.
        principal: mean squared error with 0 (the mean training image), 1, 2 ... principal
            components of the training images, (k + 1, N) float64 on the CPU.
    """

    run: TrainedRun
    found: Sequence[Reconstruction]
    neighbours: Tensor
    neighbour_error: Tensor
    principal: Tensor

    def one(self, network: str, images: str, *, inside: bool) -> Reconstruction:
        """The reconstruction of one kind."""
        asked = (network, images, inside)
        return next(r for r in self.found if (r.network, r.images, r.inside) == asked)

    @property
    def components(self) -> int:
        """Of the row of principal components in the table: a quarter of an image's entries."""
        return min(len(self.principal) - 1, self.neighbours[0].numel() // 4)


def reconstruct(run: TrainedRun, *, count: int, seed: int) -> Reconstructed:
    """Reconstruct held-out images, and as a control images that are no data.

    From x / 2, by the map of the run's K steps without noise: of the fewest steps
    that it trained with, each with the drift of the training, (1 - β) f.

    Args:
        run: whose chains start from noise.
        count: held-out images, drawn at random.
        seed: of the images' choice, the permutation and the noise.

    Raises:
        ConfigError: there are fewer test images.
    """
    data = run.data
    enough_held_out([run], count)
    generator = torch.Generator(run.device).manual_seed(seed)
    x = some_of(run, data.test_x, generator, count)
    mean = data.scale(data.train_x.double().mean(0))
    some = x[:CONTROLS]
    order = torch.randperm(x[0].numel(), generator=generator, device=run.device)
    noise = run.starts(len(some), generator)
    kinds = {
        HELD_OUT: (x, _variance(x, mean)),
        PERMUTED: (_permuted(some, order), _variance(some, mean)),
        NOISE: (noise, _variance(noise, torch.zeros_like(mean))),
    }
    fresh = run.config.make_network(data).eval().requires_grad_(False)
    first = {HELD_OUT: (some, _variance(some, mean))}
    found = [
        reconstruction
        for network, f, targets in ((TRAINED, run.network, kinds), (UNTRAINED, fresh, first))
        for inside in (True, False)
        for reconstruction in _reconstructions(run, network, f, targets, inside=inside)
    ]
    near = nearest(x, data.train_x, data.levels)
    return Reconstructed(
        run=run,
        found=found,
        neighbours=data.scale(data.train_x[near.place]),
        neighbour_error=near.distance.double().square().cpu(),
        principal=principal_errors(x, data.train_x, data.levels).cpu(),
    )


def _reconstructions(
    run: TrainedRun,
    network: str,
    f: EnergyNet,
    targets: dict[str, tuple[Tensor, float]],
    *,
    inside: bool,
) -> list[Reconstruction]:
    # All kinds together: the map is run for all of them at once.
    x = torch.cat([images for images, _ in targets.values()])
    inverse = invert(
        f,
        x,
        steps=run.settings.sgld_steps,
        step_size=run.step_size,
        z0=first_guess(x),
        inside=inside,
        stages=STAGES,
    )
    found, begin = [], 0
    for name, (images, variance) in targets.items():
        rows = slice(begin, begin + len(images))
        part = Inverse(
            z=inverse.z[rows],
            x=inverse.x[rows],
            error=inverse.error[rows],
            course=inverse.course[:, rows],
            stages=inverse.stages[:, rows],
        )
        found.append(Reconstruction(network, name, inside, images, part, variance))
        begin = rows.stop
    return found


def _variance(x: Tensor, mean: Tensor) -> float:
    return (x - mean).double().square().mean().item()


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    return x.flatten(1)[:, order].reshape(x.shape)
