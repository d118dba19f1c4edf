"""What the toys draw: data, start points and noise, and by their samplers, broken ones too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ebmguard.samplers import Mixture, sgld

from ..engine.graphs import graphed
from ..engine.task import Streams
from .distributions import DISTRIBUTIONS
from .members import Members
from .scenario import GOOD, SAMPLERS, Scenario

Sampler = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A function of the network, start points (G, n, dim) and standard normal noise
(sgld_steps, G, n, dim) that returns detached samples (G, n, dim)."""


class Draws(Streams):
    """What is random in an update: positives, start points and the noise of the chains.

    A member's numbers depend on its seed alone, not on who else is in the ensemble, so that
    members differ only in what is compared. There is a stream for each of ``members.seeds``, whose
    own seed is given.
    """

    def __init__(
        self, settings: Scenario, members: Members, seeds: Sequence[int], device: torch.device
    ) -> None:
        self.distribution = DISTRIBUTIONS[settings.data]
        self.settings, self.members = settings, members
        self.streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        super().__init__({f"seed {s}": rng for s, rng in zip(seeds, self.streams, strict=True)})

    def positives(self) -> Tensor:
        """Data of one update: (G, n_pos, dim)."""
        drawn = [self.distribution.sample(self.settings.n_pos, rng) for rng in self.streams]
        return self.members.spread(torch.stack(drawn))

    def chains(self, n: int) -> tuple[Tensor, Tensor]:
        """Start points (G, n, dim) and standard normal noise (sgld_steps, G, n, dim)."""
        settings, dim = self.settings, self.distribution.dim
        size = (settings.sgld_steps + 1, n, dim)
        drawn = [torch.randn(size, generator=rng, device=rng.device) for rng in self.streams]
        normal = self.members.spread(torch.stack(drawn, 1), 1)
        return settings.init_mean + settings.init_std * normal[0], normal[1:]


def make_sampler(settings: Scenario, name: str = GOOD) -> Sampler:
    """Short-run SGLD with its noise given, by a name of :data:`.scenario.SAMPLERS`.

    Where a scenario has no step it gives the start points.
    """
    fault = SAMPLERS[name]

    def sample_q(f: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
        return sgld(
            f,
            x0 + fault.away * settings.init_std if fault.away else x0,
            steps=len(noise),
            step_size=fault.step * settings.step_size,
            # The step of the Langevin equation is the noise's variance.
            noise_std=math.sqrt(fault.step) * settings.noise_std,
            noise=noise,
        )

    return sample_q


def make_training_sampler(settings: Scenario, device: torch.device) -> Sampler | None:
    """What draws the negatives of the training, (G, n_neg, dim) -> (G, negatives, dim).

    On a GPU as CUDA graphs. The samplers of a mixture get the same start points and noise. None
    where a scenario has no step: negatives are the start points, and no network is evaluated.
    """
    if not settings.sgld_steps:
        return None
    each = {name: graphed(make_sampler(settings, name), device) for name in settings.sampler_names}
    return Mixture(each, dim=1) if len(each) > 1 else each.popitem()[1]
