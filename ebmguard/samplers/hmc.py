"""Hamiltonian Monte Carlo, and MALA, in the units of a Langevin step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from ..errors import ConfigError, typed
from .sgld import Chains, Energy, Proposal, check_count, check_noise, evaluate, start_chains

__all__ = ["hmc", "hmc_step", "leapfrog", "mala", "mala_step"]


def leapfrog(
    f: Energy, chains: Chains, momentum: Tensor, *, steps: int, step_size: float, noise_std: float
) -> tuple[Chains, Tensor, Tensor]:
    """Follow H(x, p) = -o f(x) + |p|²/2, o = 2 step_size / noise_std**2, in steps of noise_std.

    Neal 2011, "MCMC using Hamiltonian dynamics", Eq. 2.28 to 2.30. Returns the ends, the momenta
    there, and H(start) - H(end) of the chains, float64 (float32 on MPS).
    """
    # Positions and momenta are as wide as the energies: they lose what f itself has lost, o eps f,
    # and eps √(steps entries). Where that is wider than the samples, f gets those they round to.
    wide = torch.promote_types(chains.x.dtype, chains.f.dtype)
    wide = torch.promote_types(wide, torch.float32)
    widest = torch.float32 if chains.x.device.type == "mps" else torch.float64
    kick, dim = step_size / noise_std, chains.f.ndim - 1
    x, first, lost = chains.x.to(wide), momentum.to(wide), torch.zeros_like(chains.f)
    p, end = first.add(chains.grad, alpha=kick), chains
    for left in reversed(range(steps)):
        x = x.add(p, alpha=noise_std)
        end = evaluate(f, x.to(chains.x.dtype), dim)
        p.add_(end.grad, alpha=2 * kick if left else kick)
        lost.add_(end.f, alpha=0)  # NaN, once an energy on the way is not finite

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).unsqueeze(-1).flatten(dim + 1).sum(-1).to(widest)

    climbed = end.f.to(widest) - chains.f.to(widest) + lost
    if x.dtype != end.x.dtype:  # to f at the position itself
        climbed = climbed - dot(end.grad, end.x - x)
    # |p|² as a sum of differences keeps the digits that it would lose to its size.
    gained = 2 * step_size / noise_std**2 * climbed - 0.5 * dot(p - first, p + first)
    return end, p.to(momentum.dtype), gained


@typed
def hmc_step(
    f: Energy,
    chains: Chains,
    *,
    leapfrog_steps: int,
    step_size: float,
    noise_std: float,
    generator: Generator | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[Chains, Proposal]:
    """Take one step of Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011, Fig. 2), masses 1.

    Its stationary density is exp(o f), o = 2 step_size / noise_std**2. With one leapfrog step the
    proposal is that of :func:`ebmguard.samplers.sgld_step`; more keep the momentum. Chains are
    tested one by one. A chain that starts where the energy is not finite stays there.

    Args:
        f, chains: as :func:`start_chains` takes and returns them, or the step before.
        leapfrog_steps: length of the trajectory, at least 1.
        step_size, noise_std, generator: one step's, as in :func:`ebmguard.samplers.sgld`.
        noise: z ~ N(0, I), the momenta, and u ~ U(0, 1), instead of a generator; they are
            broadcast to the shapes of x and of f.

    Raises:
        ConfigError: settings that are not above 0, or both `noise` and `generator`.
        ShapeError: a wrong result of f, see :func:`start_chains`.
    """
    walk = _trajectory(leapfrog_steps, step_size, noise_std)
    for draw, like in zip(noise or (), (chains.x, chains.f), strict=False):
        check_noise(draw, like.shape, generator)
    return _step(walk, f, chains, generator, noise)


def _step(
    walk: partial[tuple[Chains, Tensor, Tensor]],
    f: Energy,
    chains: Chains,
    generator: Generator | None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[Chains, Proposal]:
    x, device = chains.x, chains.x.device
    if noise is None:
        z = torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype)
        # In float32 at least: bfloat16 knows too few numbers below 1.
        wide = torch.promote_types(x.dtype, torch.float32)
        noise = z, torch.rand(chains.f.shape, generator=generator, device=device, dtype=wide)
    z, u = noise
    end, _, log_ratio = walk(f, chains, z)
    divergent = ~torch.isfinite(log_ratio)
    acceptance = torch.where(divergent, 0.0, log_ratio.clamp(max=0.0).exp())
    accepted = u < acceptance
    chosen = accepted.reshape(accepted.shape + (1,) * (x.ndim - accepted.ndim))
    moved = Chains(*map(torch.where, (chosen, accepted, chosen), end, chains))
    return moved, Proposal(end, acceptance, accepted, divergent)


mala_step = partial(hmc_step, leapfrog_steps=1)
""":func:`hmc_step` with one leapfrog step (Neal 2011, Section 5.2): a tested Langevin step.

The Metropolis-adjusted Langevin algorithm (Roberts and Tweedie 1996).
"""


@typed
def hmc(
    f: Energy,
    x0: Tensor,
    *,
    steps: int,
    leapfrog_steps: int,
    step_size: float,
    noise_std: float,
    generator: Generator | None = None,
    dim: int = 0,
    on_step: Callable[[Proposal], object] | None = None,
) -> Tensor:
    """Run `steps` steps of :func:`hmc_step` from `x0`.

    f is evaluated ``1 + steps * leapfrog_steps`` times. `on_step` is called with every proposal,
    which holds samples and gradients: keep its numbers. The other arguments, and the errors, are
    those of :func:`start_chains` and :func:`hmc_step`. Returns detached samples like `x0`.
    """
    check_count("steps", steps, 0)
    walk = _trajectory(leapfrog_steps, step_size, noise_std)
    chains = start_chains(f, x0, dim=dim)
    for _ in range(steps):
        chains, proposal = _step(walk, f, chains, generator)
        if on_step is not None:
            on_step(proposal)
    return chains.x


mala = partial(hmc, leapfrog_steps=1)
""":func:`hmc` with one leapfrog step: `steps` steps of :func:`mala_step` from `x0`."""


def _trajectory(
    leapfrog_steps: int, step_size: float, noise_std: float
) -> partial[tuple[Chains, Tensor, Tensor]]:
    check_count("leapfrog_steps", leapfrog_steps, 1)
    for name, value in (("step_size", step_size), ("noise_std", noise_std)):
        if not 0 < value < math.inf:
            raise ConfigError(
                f"{name} is {value}, expected a finite number above 0: the density that the chains "
                "are tested on is exp(o f) with o = 2 step_size / noise_std**2"
            )
    return partial(leapfrog, steps=leapfrog_steps, step_size=step_size, noise_std=noise_std)
