"""The sampler of the toys, in training and in evaluation, and the broken ones beside it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ebmguard.samplers import Mixture, sgld

from ..engine.graphs import first_steps, graphed
from .scenario import GOOD, SAMPLERS, Scenario

Sampler = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A function of the network, start points (G, n, dim) and standard normal noise
(sgld_steps, G, n, dim) that returns detached samples (G, n, dim)."""


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
    each = {
        name: graphed(make_sampler(settings, name), device, first_steps)
        for name in settings.sampler_names
    }
    return Mixture(each, dim=1) if len(each) > 1 else each.popitem()[1]
