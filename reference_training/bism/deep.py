"""Deep energy-based models of images, with latents and fully visible.

The networks of Bao et al. (2020): a residual network g1 with ELU and mean pooling, whose blocks are
those of :mod:`..networks`, a linear layer g2, and g3, a sum of squares: energies are never below 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..data import ImageData
from ..networks import ResidualBlock, seeded
from .config import DeepConfig
from .posterior import BernoulliPosterior, GaussianPosterior, Latent, Posterior

__all__ = ["DeepEnergy", "DeepModel", "framed", "make_model", "pixels"]

Shape = tuple[int, int, int]


class DeepEnergy(nn.Module):
    """E(v, h) = g3([g2(g1(v)) + h, h]), or without latents.

    g1 is a convolution, then three stages of ``blocks / 3`` blocks and a mean pooling each; every
    stage doubles the channels.

    Args:
        shape: (C, H, W) of v; H and W are multiples of 8.
        hidden: entries of h, and of what g2 returns.
        channels: of the first convolution.
        blocks: residual blocks, a multiple of 3.
        form: latent; visible, E(v) = g3(g2(g1(v))), all but of the same size; or wide, E(v) =
            g3(g1(v)), the published one, 3 to 4 times larger at the published sizes.
    """

    def __init__(self, shape: Shape, hidden: int, channels: int, blocks: int, form: str) -> None:
        super().__init__()
        self.hidden, (colours, height, width) = hidden, shape
        layers: list[nn.Module] = [nn.Conv2d(colours, channels, 3, padding=1)]
        make = partial(ResidualBlock, stride=1, early_stride=False, activation=F.elu)
        for before, after in pairwise(channels * 2**stage for stage in range(4)):
            layers += [make(each, after) for each in (before, *[after] * (blocks // 3 - 1))]
            layers.append(nn.AvgPool2d(2))
        self.features = nn.Sequential(*layers, nn.Flatten())
        size = (height // 8) * (width // 8) * 8 * channels
        self.project = nn.Identity() if form == "wide" else nn.Linear(size, hidden)
        inputs = {"latent": 2 * hidden, "visible": hidden, "wide": size}[form]
        self.squares = nn.ModuleDict({"layer": nn.Linear(inputs, size // 2)})

    def energy(self, v: Tensor, h: Tensor) -> Tensor:
        """E(v, h), ``(B, C, H, W)`` and ``(B, hidden)`` to ``(B,)``."""
        return self.of_projected(self.projected(v), h)

    def projected(self, v: Tensor) -> Tensor:
        """g2(g1(v)), ``(B, C, H, W)`` to ``(B, hidden)``: all that E knows of v."""
        found: Tensor = self.project(self.features(v))
        return found

    def of_projected(self, projected: Tensor, h: Tensor) -> Tensor:
        """E of v and h where g2(g1(v)) is known, ``(B,)``."""
        return self._energy_of(torch.cat((projected + h, h), -1))

    def forward(self, v: Tensor) -> Tensor:
        """f(v) = -E(v) without latents, ``(B, C, H, W)`` to ``(B,)``."""
        return -self._energy_of(self.projected(v))

    def _energy_of(self, x: Tensor) -> Tensor:
        """g3: the sum of the squares of a hidden layer."""
        return F.elu(self.squares["layer"](x)).square().sum(-1)


@dataclass(frozen=True)
class DeepModel:
    """A network, which is the energy, beside its posterior; a fully visible one has none."""

    network: DeepEnergy
    posterior: Posterior | None

    def log_density(self, generator: Generator) -> Callable[[Tensor], Tensor]:
        """What stands for f(v), ``(B, C, H, W)`` to ``(B,)``: the log weight at a new draw of h.

        Its mean is below f(v) by the KL divergence of the posterior to the exact one, and its
        gradient in v is the score where there is none. Of a fully visible model it is f itself.
        """
        if self.posterior is None:
            return self.network
        latent = Latent(self.network.energy, self.posterior)
        phi = {name: p.detach() for name, p in self.posterior.named_parameters()}
        noise = partial(self.posterior.noise, generator=generator)
        return lambda v: latent.log_weight(phi, v, noise(len(v)))

    @torch.no_grad()
    def means(self, v: Tensor) -> Tensor:
        """Posterior means, ``(B, hidden)``."""
        assert self.posterior is not None
        return self.posterior.mean(self.posterior(v))


def make_model(config: DeepConfig, data: ImageData) -> DeepModel:
    """The networks as the seed initialises them."""
    s, device = config.settings, data.train_x.device
    _, colours, height, width = pixels(data, data.train_x[:1]).shape
    shape = colours, height, width
    q: Posterior | None = None
    if config.model == "latent" and not config.is_short_run:
        make: Callable[[], Posterior] = partial(GaussianPosterior, shape, s.hidden, s.widths)
        if config.posterior == "bernoulli":
            make = partial(BernoulliPosterior, math.prod(shape), s.hidden)
        q = seeded(make, config.seed + 1, device)
    network = partial(DeepEnergy, shape, s.hidden, s.channels, s.blocks, config.model)
    return DeepModel(seeded(network, config.seed, device), q)


def pixels(data: ImageData, x: Tensor) -> Tensor:
    """Bytes ``(B, C, H, W)`` as a model sees them: in [0, 1], framed by 0 to a multiple of 8."""
    frame = [side for size in (x.shape[-1], x.shape[-2]) for side in framed(size)]
    return F.pad((data.scale(x) + 1) / 2, frame)


def framed(size: int) -> tuple[int, int]:
    """Pixels of the frame before and after so many."""
    lacking = -size % 8
    return lacking // 2, lacking - lacking // 2
