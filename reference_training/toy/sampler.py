"""The sampler of the toys, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ebmguard.samplers import sgld

from .scenario import Scenario


def make_sampler(settings: Scenario) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Short-run SGLD with its noise given; the start points where a scenario has no step.

    Returns:
        a function of the network, start points (G, n, dim) and standard normal noise
        (sgld_steps, G, n, dim) that returns detached samples (G, n, dim).
    """

    def sample_q(f: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
        return sgld(
            f,
            x0,
            steps=settings.sgld_steps,
            step_size=settings.step_size,
            noise_std=settings.noise_std,
            noise=noise,
        )

    return sample_q
