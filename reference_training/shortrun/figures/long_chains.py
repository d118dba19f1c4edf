"""Chains of a run that go on for many times the steps of training, from noise and from data.

Nijkamp et al. (2020), "On the Anatomy of MCMC-Based Maximum Likelihood Learning of Energy-Based
Models": what the steady state of a model looks like decides whether it was learned convergently;
short-run samples do not show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from .measured import Measured, measure, noisy, some_of

if TYPE_CHECKING:
    from ..trained import TrainedRun

COUNT = 64
"""Chains from each kind of start."""
SHOWN = 3
"""Chains of each kind whose images are kept."""
TIMES = 100
"""The last observation, in multiples of K."""
TOGETHER = 200
"""Chains that are run together: the noise of many steps is drawn at once."""
LOW, HIGH = 0.025, 0.975
"""Quantiles of the data between which an image counts as one like them."""


@dataclass(frozen=True)
class Chains:
    """Chains from one kind of start, as they were at the stops.

    Attributes:
        start: "noise" or "data".
        stops: numbers of steps, ascending from 0.
        seen: the chains at each of them.
        moved: (stops, n) root mean square over the entries of the difference to the start.
        largest: largest |x| of all chains at each stop; infinite or NaN where one is not finite.
        spread: at each stop, :func:`spread` of the finite ones.
        images: of the first chains, (at most SHOWN, stops, C, H, W), on the CPU.
    """

    start: str
    stops: tuple[int, ...]
    seen: tuple[Measured, ...]
    moved: Tensor
    largest: tuple[float, ...]
    spread: tuple[float, ...]
    images: Tensor

    def finite(self, stop: int) -> Tensor:
        """Which chains are finite images after so many steps, (n,)."""
        return self._at(stop).each["contrast"].isfinite()

    def lost(self) -> tuple[int, int] | None:
        """Steps between which a chain first left the finite numbers; None where none did."""
        for before, after in zip(self.stops, self.stops[1:], strict=False):
            if not self.finite(after).all():
                return before, after
        return None

    def values(self, name: str, stop: int) -> Tensor:
        """A number of each chain that is still finite, (at most n,).

        Args:
            name: one of :class:`Measured`, or "moved".
            stop: one of the stops.
        """
        place = self.stops.index(stop)
        every = self.moved[place] if name == "moved" else self.seen[place].each[name]
        return every[self.finite(stop)]

    def mean(self, name: str, stop: int) -> float:
        """Its mean over the chains that are still finite; NaN where none is."""
        return self.values(name, stop).mean().item()

    def _at(self, stop: int) -> Measured:
        return self.seen[self.stops.index(stop)]


@dataclass(frozen=True)
class LongRun:
    """A run's chains and what they are held against.

    Attributes:
        run: whose.
        chains: from noise, and from held-out images with the noise of training.
        data: training images with the noise of training.
        held_out: test images with it.
        data_spread: :func:`spread` of the data.
    """

    run: TrainedRun
    chains: tuple[Chains, Chains]
    data: Measured
    held_out: Measured
    data_spread: float

    @property
    def trained(self) -> int:
        """K, the smallest number of steps of an update."""
        return self.run.settings.sgld_steps

    @property
    def training(self) -> str:
        """How the chains of the training were made, in words."""
        settings = self.run.settings
        low, high = settings.sgld_steps, settings.most_sgld_steps
        steps = f"K = {low}" if low == high else f"K from {low} to {high}"
        if self.run.config.most_steps > 1:
            steps += f" (up to {self.run.config.most_steps} times as many, as much finer)"
        start = "chains from noise" if settings.init == "noise" else "persistent chains"
        return f"trained with {steps}, {start}, σ = {settings.noise_std:g}"

    @property
    def last(self) -> int:
        """The last stop."""
        return self.chains[0].stops[-1]

    def of_data(self, name: str, chains: Chains, stop: int) -> float:
        """A mean over that of the data, for "distance" of held-out images; NaN where that is 0."""
        own = (self.held_out if name == "distance" else self.data).mean(name)
        return chains.mean(name, stop) / own if own else math.nan

    def variety(self, chains: Chains, stop: int) -> float:
        """The chains' spread over the data's: less than 1 where many have become alike."""
        return chains.spread[chains.stops.index(stop)] / self.data_spread

    def quantiles(self, name: str) -> tuple[float, float]:
        """The 2.5% and 97.5% quantiles of the data."""
        ends = self.data.each[name].quantile(torch.tensor([LOW, HIGH], dtype=torch.float64))
        return ends[0].item(), ends[1].item()

    def above(self, name: str, chains: Chains, stop: int) -> float:
        """Share of the finite chains above the data's 97.5% quantile, where 2.5% of the data are.

        NaN where no chain is finite.
        """
        return (chains.values(name, stop) > self.quantiles(name)[1]).double().mean().item()

    def below(self, name: str, chains: Chains, stop: int) -> float:
        """Share of the finite chains below the data's 2.5% quantile; NaN where none is finite."""
        return (chains.values(name, stop) < self.quantiles(name)[0]).double().mean().item()

    def shift(self, chains: Chains, stop: int) -> float:
        """How far mean f is from the data's, in standard deviations of f over the data.

        Chains that start from data, and end with f elsewhere, have left what the data are under
        the model: its steady state is another. NaN where f is one number for all data.
        """
        spread = self.data.each["f"].std(correction=0).item()
        return (chains.mean("f", stop) - self.data.mean("f")) / spread if spread else math.nan

    def pull(self, slope: float) -> float:
        """The length of a step's drift over the mean length of its noise.

        Args:
            slope: length of the gradient of f.
        """
        settings = self.run.settings
        noise = settings.noise_std * math.sqrt(math.prod(self.run.data.sample_shape))
        return slope * settings.step_size * abs(self.run.drift) / noise


def stops_of(trained: int, last: int) -> tuple[int, ...]:
    """Where chains are looked at: 0, K, 2 K, 5 K, 10 K, 20 K, ... and `last`.

    Args:
        trained: K, 1 or more.
        last: steps, K or more.
    """
    stops, scale = {0, last}, 1
    while scale * trained < last:
        stops |= {n * scale * trained for n in (1, 2, 5) if n * scale * trained < last}
        scale *= 10
    return tuple(sorted(stops))


def last_stop(trained: Sequence[int]) -> int:
    """One end for all runs: 100 times the largest K."""
    return TIMES * max(trained)


def chain_count(run: TrainedRun, asked: int | None) -> int:
    """Chains of each kind: as asked for, or :data:`COUNT` where there are as many test images.

    Raises:
        ConfigError: there are fewer test images than chains asked for.
    """
    there = len(run.data.test_x)
    if asked is None:
        return min(COUNT, there)
    if asked > there:
        raise ConfigError(
            f"{asked} chains were asked for, and {run.path} has {there} test images for them to "
            f"start from; expected a count of at most {there}"
        )
    return asked


def spread(images: Tensor) -> float:
    """How unlike images are: the root of the variance over images, on the mean of their entries.

    Args:
        images: (N, ...); those that are not finite are left out. NaN where fewer than two are left.
    """
    rows = images.detach().cpu().double().flatten(1)
    rows = rows[rows.isfinite().all(dim=1)]
    return rows.var(dim=0).mean().sqrt().item() if len(rows) > 1 else math.nan


def long_run(run: TrainedRun, stops: Sequence[int], *, count: int, seed: int) -> LongRun:
    """Run chains as in training, but on and on, and measure them on their way.

    Runs with images of one shape get the same starts from one seed.

    Args:
        run: whose chains. Persistent ones of its training are not needed: these start anew.
        stops: numbers of steps, ascending from 0.
        count: chains from each kind of start, at most as many as test images.
        seed: of starts and noise, and of the images that chains are held against.
    """
    generator = torch.Generator(run.device).manual_seed(seed)
    noise_starts = run.starts(count, generator)
    held_out = some_of(run, run.data.test_x, generator)
    data_starts = noisy(run, some_of(run, run.data.test_x, generator, count), generator)
    data = noisy(run, some_of(run, run.data.train_x, generator), generator)
    starts = torch.cat([noise_starts, data_starts])
    x, done = starts, 0
    seen: list[list[Tensor]] = [[], []]
    for stop in stops:
        parts = [run.chains(part, stop - done, generator) for part in torch.split(x, TOGETHER)]
        x, done = torch.cat(parts), stop
        for kind, own in zip(seen, torch.split(x, count), strict=True):
            kind.append(own)
    noise, from_data = (
        _chains(run, name, tuple(stops), torch.stack(states))
        for name, states in zip(("noise", "data"), seen, strict=True)
    )
    reference = measure(run, noisy(run, held_out, generator))
    return LongRun(run, (noise, from_data), measure(run, data), reference, spread(data))


def _chains(run: TrainedRun, start: str, stops: tuple[int, ...], states: Tensor) -> Chains:
    # In float64, where squares of what is still finite are finite too.
    moves = (states.double() - states[0].double()).square().flatten(2).mean(dim=2).sqrt()
    return Chains(
        start=start,
        stops=stops,
        seen=tuple(measure(run, x) for x in states),
        moved=moves.cpu(),
        largest=tuple(states.abs().flatten(1).amax(dim=1).tolist()),
        spread=tuple(map(spread, states)),
        images=states[:, :SHOWN].transpose(0, 1).cpu(),
    )
