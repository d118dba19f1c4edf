"""The sampler of the JEM trainer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ebmguard.samplers import ReplayBuffer, sgld

from ..graphs import graphed
from ..networks import frozen
from .scenarios import Scenario


def make_sampler(
    settings: Scenario, count: int, generator: torch.Generator
) -> Callable[..., Tensor]:
    """JEM's sampler: persistent chains from the buffer, a few Langevin steps, written back.

    On a GPU all steps of a call are one CUDA graph.

    Args:
        settings: of the chains.
        count: samples of a call without labels.
        generator: source of the noise, on the device of the chains.

    Returns:
        a function (network, buffer, labels (n,) int64 or None) -> samples (n, C, H, W). With
        labels the chains climb f(x, y), from the buffer's rows of that class. It belongs to one
        network and one guard: what a graph has captured is theirs.
    """
    device = generator.device

    def climb(network: nn.Module, x0: Tensor, noise: Tensor, *labels: Tensor) -> Tensor:
        def f(x: Tensor) -> Tensor:
            energy: Tensor = network(x, *labels)
            return energy

        # A compiled network would compute the parameters' gradients along with the samples'.
        with frozen(network):
            return sgld(
                f,
                x0,
                steps=settings.sgld_steps,
                step_size=settings.step_size,
                noise_std=settings.noise_std,
                noise=noise,
            )

    chains = graphed(climb, device)

    def sample_q(f: nn.Module, buffer: ReplayBuffer, labels: Tensor | None = None) -> Tensor:
        x0, rows = buffer.sample(count if labels is None else len(labels), labels)
        shape = (settings.sgld_steps, *x0.shape)
        noise = torch.randn(shape, generator=generator, device=device, dtype=x0.dtype)
        x = chains(f, x0, noise, *(() if labels is None else (labels,)))
        buffer.write(rows, x)
        return x.clone()  # a graph overwrites its result in the next call

    return sample_q
