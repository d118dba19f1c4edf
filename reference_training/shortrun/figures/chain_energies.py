"""f of a run on training images and on fresh negatives, of one or several step sizes.

Data have the noise of the training. It is what f was raised on, so that the two distributions are
those whose means the training's gap compares; f on the clean images is measured beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..trained import TrainedRun
from .measured import noisy, some_of
from .separation import Floats, Separation, separation
from .several import negatives

LARGER = 4.0
"""Of Figure 14: the factor on the SGLD step size α."""


@dataclass(frozen=True)
class Energies:
    """f of one run; N values each.

    Attributes:
        label: of the run.
        beta_star: exponent of the weights on raw outputs.
        data: on training images with the noise of the training.
        clean: on the same images without.
        negatives: on chains, by the factor on their step size α; 1 is as in training.
    """

    label: str
    beta_star: float
    data: Floats
    clean: Floats
    negatives: dict[float, Floats]

    def separation(self, factor: float) -> Separation:
        """The negatives of a step size beside the data."""
        return separation(self.data, self.negatives[factor])

    @property
    def rise(self) -> float:
        """How far the mean f⁻ rises by the larger steps, in standard deviations of f⁺.

        NaN where one of them is undefined; where f⁺ does not vary infinite, or NaN of no rise.
        """
        plain, larger = self.separation(1.0), self.separation(LARGER)
        rise = larger.mean - plain.mean
        return rise / plain.data_std if plain.data_std else rise * math.inf


def measure(
    run: TrainedRun, label: str, count: int, seed: int, factors: Sequence[float]
) -> Energies:
    """f on training images and on chains; at every factor the same starts and noise.

    Args:
        run: the run.
        label: of it.
        count: images and chains; fewer where there are fewer images.
        seed: of the images, their noise, the chains' starts and their noise.
        factors: on the step size α of the chains.
    """
    generator = torch.Generator(run.device).manual_seed(seed)
    clean = some_of(run, run.data.train_x, generator, count)
    data = noisy(run, clean, generator)
    starts = run.starts(len(clean), generator)
    state = generator.get_state()
    chains = {}
    for factor in factors:
        generator.set_state(state)
        chains[factor] = _numpy(run.energies(negatives(run, starts, generator, factor)))
    return Energies(
        label=label,
        beta_star=float(run.config.beta_star),
        data=_numpy(run.energies(data)),
        clean=_numpy(run.energies(clean)),
        negatives=chains,
    )


def _numpy(x: Tensor) -> Floats:
    values: Floats = x.double().cpu().numpy()
    return values
