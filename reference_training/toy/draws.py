"""Random numbers of an ensemble: one stream for each seed, shared across β and variants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.streams import Streams
from .distributions import Distribution
from .members import Members
from .scenario import Scenario


class Draws(Streams):
    """What is random in an update: positives, start points and the noise of the chains.

    A member's numbers depend on its seed alone, not on who else is in the ensemble, so that
    members differ only in what is compared. There is a stream for each of ``members.seeds``, whose
    own seed is given.
    """

    def __init__(
        self,
        distribution: Distribution,
        settings: Scenario,
        members: Members,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        self.distribution, self.settings, self.members = distribution, settings, members
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
