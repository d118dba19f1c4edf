"""The sampler of the JEM trainer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ebmguard.samplers import ReplayBuffer, sgld

from ..graphs import graphed
from ..networks import frozen
from .scenarios import Scenario

Sampler = Callable[..., Tensor]


def make_chains(
    settings: Scenario, device: torch.device, *, steps: int | None = None
) -> Callable[..., Tensor]:
    """Langevin steps from given start points, in one CUDA graph on a GPU.

    Args:
        settings: step size and noise.
        device: where the chains run.
        steps: number of steps; None is the scenario's.

    Returns:
        a function (network, x0 (n, C, H, W), noise (steps, n, C, H, W), labels (n,) int64 or
        nothing) -> samples (n, C, H, W). With labels the chains climb f(x, y). On a GPU the
        samples are overwritten by the next call.
    """
    count = settings.sgld_steps if steps is None else steps

    def chains(network: nn.Module, x0: Tensor, noise: Tensor, *labels: Tensor) -> Tensor:
        def f(x: Tensor) -> Tensor:
            energy: Tensor = network(x, *labels)
            return energy

        # A compiled network would compute the parameters' gradients along with the samples'.
        with frozen(network):
            return sgld(
                f,
                x0,
                steps=count,
                step_size=settings.step_size,
                noise_std=settings.noise_std,
                noise=noise,
            )

    return graphed(chains, device)


def make_sampler(settings: Scenario, count: int, generator: torch.Generator) -> Sampler:
    """JEM's sampler: persistent chains from the buffer, a few Langevin steps, written back.

    Args:
        settings: of the chains.
        count: samples of a call without labels.
        generator: source of the noise, on the device of the chains.

    Returns:
        a function (network, buffer, labels (n,) int64 or None) -> samples (n, C, H, W). With
        labels they are samples of p(x|y), from the buffer's rows of that class.
    """
    device = generator.device
    chains = make_chains(settings, device)

    def sample_q(f: nn.Module, buffer: ReplayBuffer, labels: Tensor | None = None) -> Tensor:
        x0, rows = buffer.sample(count if labels is None else len(labels), labels)
        shape = (settings.sgld_steps, *x0.shape)
        noise = torch.randn(shape, generator=generator, device=device, dtype=x0.dtype)
        x = chains(f, x0, noise, *(() if labels is None else (labels,)))
        buffer.write(rows, x)
        return x.clone()

    return sample_q
