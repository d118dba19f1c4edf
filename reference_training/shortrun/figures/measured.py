"""Images in numbers: how saturated they are, what the model says of them, and how far data are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...judge.ood import values_and_slopes
from .nearest import nearest
from .saturation import saturation

if TYPE_CHECKING:
    from ..trained import TrainedRun

REFERENCES = 500
"""Images of a data set, at most, that samples are held against."""
BATCH = 256
"""Images that pass the network together."""


@dataclass(frozen=True)
class Measured:
    """Some images in numbers.

    Attributes:
        each: by name, one number for each image, (N,) float64 on the CPU: those of
            :class:`Saturation`; "f"; "slope", the length of its gradient; and "distance", the root
            mean square difference to the nearest training image, in units of a pixel in [-1, 1].
    """

    each: Mapping[str, Tensor]

    def mean(self, name: str) -> float:
        """The mean over the images; NaN where one is not finite."""
        return self.each[name].mean().item()

    def means(self) -> dict[str, float]:
        """All means."""
        return {name: self.mean(name) for name in self.each}


def measure(run: TrainedRun, x: Tensor) -> Measured:
    """Images, (N, C, H, W), by a run's network and its training images."""
    values, slopes = values_and_slopes(run.network, x, BATCH)
    distance = nearest(x, run.data.train_x, run.data.levels).distance
    named = {"f": values, "slope": slopes, "distance": distance}
    each = {name: value.cpu().double() for name, value in named.items()}
    return Measured({**saturation(x, run.data.levels)._asdict(), **each})


def some_of(
    run: TrainedRun, images: Tensor, generator: torch.Generator, count: int | None = None
) -> Tensor:
    """Random images of a run's data set in [-1, 1], at most `count`; None: :data:`REFERENCES`."""
    order = torch.randperm(len(images), generator=generator, device=run.device)
    chosen = order[: REFERENCES if count is None else count]
    return run.data.scale(images[chosen])


def noisy(run: TrainedRun, images: Tensor, generator: torch.Generator) -> Tensor:
    """Images with the noise of a run's training."""
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    return images + run.settings.data_noise * noise


def describe(run: TrainedRun) -> str:
    """A run in a line: its folder, its data, β*, the K of training, and for how long it trained."""
    low, high = run.settings.sgld_steps, run.settings.most_sgld_steps
    steps = f"K = {low}" if low == high else f"K from {low} to {high}"
    if run.config.most_steps > 1:
        steps += f" (in training up to {run.config.most_steps} times as many, as much finer)"
    words = [run.data.name, f"β* = {run.config.beta_star:g}", steps, f"{run.step:,} updates"]
    return f"{run.name}: {', '.join(words)}"
