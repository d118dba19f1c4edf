"""The sampler of the JEM trainer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ebmguard.samplers import ReplayBuffer, sgld

from ..engine.graphs import graphed
from ..networks import frozen
from .scenarios import Scenario


def make_sampler(
    settings: Scenario,
    count: int,
    generator: torch.Generator,
    next_steps: Callable[[], int] | None = None,
    *,
    as_graph: bool = True,
) -> Callable[..., Tensor]:
    """JEM's sampler: persistent chains from the buffer, a few Langevin steps, written back.

    On a GPU all steps of a call may be one CUDA graph, one for each number of them.

    Args:
        settings: of the chains.
        count: samples of a call without labels.
        generator: source of the noise, on the device of the chains.
        next_steps: asked at every call for the number of steps
            (:meth:`ebmguard.Guard.next_steps`); None: as the settings have it.
        as_graph: on a GPU; a guard sees no step inside a graph, and makes none finer.

    Returns:
        a function (network, buffer, labels (n,) int64 or None) -> samples (n, C, H, W). With
        labels the chains climb f(x, y), from the buffer's rows of that class. It belongs to one
        network and one guard: what a graph has captured is theirs.
    """
    device = generator.device

    def climb(network: nn.Module, x0: Tensor, noise: Tensor, *labels: Tensor) -> Tensor:
        # A compiled network would compute the parameters' gradients along with the samples'.
        with frozen(network) as f:
            return sgld(
                lambda x: f(x, *labels),
                x0,
                steps=len(noise),
                step_size=settings.step_size,
                noise_std=settings.noise_std,
                noise=noise,
            )

    chain = graphed(climb, device) if as_graph else climb

    def sample_q(f: nn.Module, buffer: ReplayBuffer, labels: Tensor | None = None) -> Tensor:
        x0, rows = buffer.sample(count if labels is None else len(labels), labels)
        steps = next_steps() if next_steps is not None else settings.sgld_steps
        shape = (steps, *x0.shape)
        noise = torch.randn(shape, generator=generator, device=device, dtype=x0.dtype)
        x = chain(f, x0, noise, *(() if labels is None else (labels,)))
        buffer.write(rows, x)
        return x.clone()  # a graph overwrites its result in the next call

    return sample_q
