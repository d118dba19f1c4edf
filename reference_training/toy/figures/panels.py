"""What a figure shows, as arrays and words: densities on the grid and the numbers below them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...plots.numbers import number
from ..grid import Grid
from ..kde import bandwidth, kde
from ..metrics import log_masses
from .runs import Member, ToyRun
from .specs import FigureSpec
from .spread import spread
from .words import DATA, VARIANT, negatives, who_draws

FLOOR = 1e-10
"""Added to a density before its logarithm is drawn, as in the code of Nijkamp et al. (2020)."""


@dataclass(frozen=True)
class Panel:
    """A density, drawn twice: as it is, and its logarithm.

    Attributes:
        density: on the grid, (n, n) with index [y, x] or (n,); None where it is not finite.
        captions: lines that stand below the density, and those below the log density.
        instead: what is written where there is no density to draw.
    """

    density: NDArray[np.float64] | None
    captions: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    instead: str = "not finite"

    @property
    def log_density(self) -> NDArray[np.float64] | None:
        """Logarithm of the density, never below that of :data:`FLOOR`."""
        return None if self.density is None else np.log(self.density + FLOOR)


@dataclass(frozen=True)
class Band:
    """A row of densities over a row of log densities, all of one run.

    Attributes:
        label: what tells it from the other bands.
        axis: (n,) coordinates of the grid.
        truth: the density of the data.
        pairs: p_θ and the kernel density estimate of SGLD(p_θ), for every column of the figure.
    """

    label: str
    axis: NDArray[np.float64]
    truth: Panel
    pairs: tuple[tuple[Panel, Panel], ...]

    @property
    def flat(self) -> bool:
        """Whether the densities are of one dimension."""
        return self.truth.density is not None and self.truth.density.ndim == 1


@dataclass(frozen=True)
class Picture:
    """One file of a figure.

    Attributes:
        name: of the file, without its ending.
        title: what it shows.
        bands: from top to bottom.
    """

    name: str
    title: str
    bands: tuple[Band, ...]


def pictures(spec: FigureSpec, runs: Mapping[str, ToyRun]) -> tuple[Picture, ...]:
    """What a figure shows: one picture, or one for each run.

    Args:
        spec: the figure.
        runs: the runs of its scenarios.

    Raises:
        ConfigError: a run lacks members that the figure shows.
    """
    own = [
        (run, tuple(_band(spec, run, line) for line in spec.lines))
        for run in (runs[scenario] for scenario in spec.scenarios)
    ]
    name = f"figure_{spec.name}"
    if spec.split:
        return tuple(
            Picture(f"{name}_{run.data}", f"{spec.title}, {DATA[run.data]}", bands)
            for run, bands in own
        )
    return (Picture(name, spec.title, tuple(band for _, bands in own for band in bands)),)


def true_density(run: ToyRun) -> NDArray[np.float64]:
    """Density of the data on the run's grid, in the form that the paper's pictures show."""
    grid = _grid(run)
    return _numpy(run.distribution.pictured_log_density(grid.points).exp(), grid)


def learned_density(run: ToyRun, member: Member) -> NDArray[np.float64] | None:
    """Density of p_θ on the run's grid, normalised there; None where it is not finite."""
    grid = _grid(run)
    energies = torch.from_numpy(run.negative_energy[member.index]).double().flatten()
    return _finite((log_masses(energies) - math.log(grid.cell)).exp(), grid)


def sampled_density(run: ToyRun, member: Member) -> NDArray[np.float64] | None:
    """Kernel density estimate of SGLD(p_θ) on the run's grid; None where it is not finite."""
    grid = _grid(run)
    samples = torch.from_numpy(run.samples[member.index]).double()
    return _finite(kde(samples, grid, bandwidth(run.distribution, grid)), grid)


def _band(spec: FigureSpec, run: ToyRun, line: str) -> Band:
    labels = {
        "data": DATA[run.data],
        "updates": f"{DATA[run.data]}, {run.settings['iterations']:,} updates",
        "variant": VARIANT.get(line, line),
        "negatives": f"{DATA[run.data]}\n{negatives(run)}",
        "samplers": f"{DATA[run.data]}\n{who_draws(run)}",
    }
    members = [run.of(*spec.member(line, column))[0] for column in spec.columns]
    return Band(
        label=labels[spec.band],
        axis=run.axis,
        truth=Panel(true_density(run)),
        pairs=tuple(_pair(run, member) for member in members),
    )


def _pair(run: ToyRun, member: Member) -> tuple[Panel, Panel]:
    learned = (_caption(run, member, "kl", "KL"), _caption(run, member, "tv", "TV"))
    sampled = (_caption(run, member, "kl_sgld", "KL"), _caption(run, member, "tv_sgld", "TV"))
    instead = "not finite"
    if member.diverged_at is not None:
        instead = f"diverged at\nupdate {member.diverged_at:,}"
        alert = run.first_alert(member)
        heard: tuple[str, ...] = ("no alert",)
        if alert is not None:
            heard = (f"{alert['level']} at {alert['step']:,}:", str(alert["rule"]))
        learned = ((f"diverged at {member.diverged_at:,}", *learned[0][1:]), heard)
    return (
        Panel(learned_density(run, member), learned, instead),
        Panel(sampled_density(run, member), sampled, instead),
    )


def _caption(run: ToyRun, member: Member, metric: str, name: str) -> tuple[str, ...]:
    own = f"{name} {number(member.metrics[metric], 2)}"
    if run.seeds == 1:
        return (own,)
    median = spread(run, member.beta, member.variant, metric).median
    if math.isnan(median):
        return own, "median undefined"
    return own, f"median of {run.seeds}: {number(median, 2)}"


def _grid(run: ToyRun) -> Grid:
    return Grid.of(run.distribution, resolution=len(run.axis))


def _finite(density: Tensor, grid: Grid) -> NDArray[np.float64] | None:
    return _numpy(density, grid) if bool(density.isfinite().all()) else None


def _numpy(density: Tensor, grid: Grid) -> NDArray[np.float64]:
    values: NDArray[np.float64] = density.reshape(grid.shape).numpy()
    return values
