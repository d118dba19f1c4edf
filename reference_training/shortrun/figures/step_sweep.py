"""A run's chains, observed before, at and after the number of steps that training gave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .measured import BATCH, Measured, measure, noisy, some_of

if TYPE_CHECKING:
    from ..trained import TrainedRun

INTERVALS = 10
SHOWN = 3
"""Chains whose images are kept."""


@dataclass(frozen=True)
class Sweep:
    """The chains of one run.

    Attributes:
        run: whose.
        stops: numbers of steps K2, ascending from 0.
        chains: at each of them, the same chains.
        data: training images with the noise of training: what negatives are to be like.
        clean: the same images without noise.
        held_out: test images without noise.
        images: the first chains, (at most SHOWN, stops, C, H, W), on the CPU.
    """

    run: TrainedRun
    stops: tuple[int, ...]
    chains: tuple[Measured, ...]
    data: Measured
    clean: Measured
    held_out: Measured
    images: Tensor

    @property
    def trained(self) -> tuple[int, int]:
        """K1, the steps of training: the fewest and the most."""
        return self.run.settings.sgld_steps, self.run.settings.most_sgld_steps

    def at(self, steps: int) -> Measured:
        """The chains after so many steps, one of the stops."""
        return self.chains[self.stops.index(steps)]

    def gap(self, steps: int) -> float:
        """Mean f(data) - mean f(x-) after so many steps."""
        return self.data.mean("f") - self.at(steps).mean("f")

    def over_data(self, steps: int, name: str) -> float:
        """A mean of the chains over that of the data, of held-out images where it is a distance.

        NaN where the data's is 0.
        """
        own = (self.held_out if name == "distance" else self.data).mean(name)
        return self.at(steps).mean(name) / own if own else torch.nan


def even_stops(trained: Sequence[int]) -> tuple[int, ...]:
    """Eleven even steps from 0 to twice the largest K1 (author response, question 3).

    Args:
        trained: K1 of each run.
    """
    last = 2 * max(trained)
    return tuple(sorted({round(i * last / INTERVALS) for i in range(INTERVALS + 1)}))


def stops_of(trained: Sequence[int]) -> tuple[int, ...]:
    """Where chains are looked at: the even stops, and every run's K1 and 2 K1."""
    own = {stop for steps in trained for stop in (steps, 2 * steps)}
    return tuple(sorted(own | set(even_stops(trained))))


def sweep(run: TrainedRun, stops: Sequence[int], *, count: int, seed: int) -> Sweep:
    """Run chains from noise, as in training, and measure them on their way.

    One chain gives all stops: what it is after 40 steps comes of what it was after 20. Runs with
    images of one shape get the same starts and the same noise from one seed.

    Args:
        run: whose chains.
        stops: numbers of steps, ascending from 0.
        count: chains.
        seed: of their starts and noise, and of the images that they are held against.
    """
    generator = torch.Generator(run.device).manual_seed(seed)
    x = run.starts(count, generator)
    chains, images, done = [], [], 0
    for stop in stops:
        parts = torch.split(x, BATCH)
        x = torch.cat([run.chains(part, stop - done, generator) for part in parts])
        done = stop
        chains.append(measure(run, x))
        images.append(x[:SHOWN].cpu())
    generator.manual_seed(seed)
    clean = some_of(run, run.data.train_x, generator)
    data = noisy(run, clean, generator)
    return Sweep(
        run=run,
        stops=tuple(stops),
        chains=tuple(chains),
        data=measure(run, data),
        clean=measure(run, clean),
        held_out=measure(run, some_of(run, run.data.test_x, generator)),
        images=torch.stack(images, dim=1),
    )
