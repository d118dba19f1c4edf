"""Metropolis-adjusted Langevin algorithm: SGLD's step, with a test that makes it exact."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .hmc import Chains, Proposal, Tally, hmc, hmc_step

__all__ = ["mala", "mala_step"]


def mala_step(
    f: Callable[[Tensor], Tensor],
    chains: Chains,
    *,
    step_size: float,
    noise_std: float,
    generator: torch.Generator | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[Chains, Proposal]:
    """Propose the Langevin step of :func:`ebmguard.samplers.sgld_step`, accept or reject it.

    Roberts and Tweedie 1996: x' = x + step_size * grad + noise_std * z is accepted with probability
    min(1, p(x') q(x | x') / (p(x) q(x' | x))), where p ∝ exp(o f), o = 2 step_size / noise_std**2,
    and q is the density of the proposal. This is Hamiltonian Monte Carlo with one leapfrog step
    (Neal 2011, Section 5.2), and is computed as that.

    Args, Returns, Raises: as for :func:`ebmguard.samplers.hmc_step`.
    """
    return hmc_step(
        f,
        chains,
        leapfrog_steps=1,
        step_size=step_size,
        noise_std=noise_std,
        generator=generator,
        noise=noise,
    )


def mala(
    f: Callable[[Tensor], Tensor],
    x0: Tensor,
    *,
    steps: int,
    step_size: float,
    noise_std: float,
    generator: torch.Generator | None = None,
    dim: int = 0,
) -> tuple[Tensor, Tally]:
    """Run `steps` steps of :func:`mala_step` from `x0`, with ``1 + steps`` evaluations of f.

    Args, Returns, Raises: as for :func:`ebmguard.samplers.hmc`.
    """
    return hmc(
        f,
        x0,
        steps=steps,
        leapfrog_steps=1,
        step_size=step_size,
        noise_std=noise_std,
        generator=generator,
        dim=dim,
    )
