"""Hamiltonian Monte Carlo on a negative energy, in the units of a Langevin step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from .sgld import check_noise

__all__ = ["Chains", "Proposal", "Tally", "hmc", "hmc_step", "leapfrog", "start_chains"]


class Chains(NamedTuple):
    """Where chains are, and what is known of f there, so that no evaluation is done twice.

    It belongs to one f: after a change of its parameters, or of β, start anew.

    Attributes:
        x: the samples, ``(B, ...)``, or ``(*models, B, ...)`` of an ensemble.
        f: their negative energy, ``(B,)`` or ``(*models, B)``.
        grad: its gradient, in the shape of ``x``.
    """

    x: Tensor
    f: Tensor
    grad: Tensor


class Proposal(NamedTuple):
    """What a step proposed to each chain, and what became of it.

    Attributes:
        chains: where the proposals are, accepted or not.
        acceptance: probability of being accepted, ``(B,)`` or ``(*models, B)``.
        accepted: whether they were, in the same shape.
        divergent: whether an energy was not finite on the way; those are never accepted.
    """

    chains: Chains
    acceptance: Tensor
    accepted: Tensor
    divergent: Tensor


class Tally(NamedTuple):
    """What became of a run's proposals, for each chain: ``(B,)`` or ``(*models, B)``.

    Attributes:
        acceptance: their mean probability of being accepted; NaN of a run without steps.
        divergent: how many came upon an energy that was not finite.
    """

    acceptance: Tensor
    divergent: Tensor


def start_chains(f: Callable[[Tensor], Tensor], x0: Tensor, *, dim: int = 0) -> Chains:
    """Evaluate f and its gradient at the start points.

    Args:
        f: negative energy, one value for each sample.
        x0: start points, ``(B, ...)``, or ``(*models, B, ...)`` of an ensemble.
        dim: the batch dimension; 1 for ``(models, B, ...)``.

    Raises:
        ShapeError: f does not return one number for each sample. Each chain is accepted or
            rejected by its own energy, so that heads have to be joined first.
    """
    x = x0.detach().requires_grad_()
    with torch.enable_grad():
        values = f(x)
        if values.shape != x.shape[: dim + 1]:
            raise ShapeError(
                f"f returned shape {tuple(values.shape)} for samples of shape {tuple(x.shape)}; "
                f"expected one number for each sample: {tuple(x.shape[: dim + 1])}. Squeeze or sum "
                "its heads, and give the batch dimension of an ensemble as dim=."
            )
        (grad,) = torch.autograd.grad(values.sum(), x)
    return Chains(x.detach(), values.detach(), grad)


def leapfrog(
    f: Callable[[Tensor], Tensor],
    chains: Chains,
    momentum: Tensor,
    *,
    steps: int,
    step_size: float,
    noise_std: float,
) -> tuple[Chains, Tensor, Tensor]:
    """Follow Hamilton's equations for `steps` leapfrog steps.

    Of H(x, p) = -o f(x) + |p|²/2 with o = 2 step_size / noise_std**2, in steps of length noise_std
    (Neal 2011, "MCMC using Hamiltonian dynamics", Eq. 2.28 to 2.30). With the momentum turned round
    it goes back the way it came.

    Args:
        f: negative energy, as in :func:`start_chains`.
        chains: where the trajectories start.
        momentum: p, in the shape of the samples.
        steps: number of leapfrog steps.
        step_size: as in :func:`ebmguard.samplers.sgld_step`.
        noise_std: likewise.

    Returns:
        the ends of the trajectories, the momenta there, and H(start) - H(end) for each chain,
        float64 (float32 on MPS).
    """
    kick = step_size / noise_std
    dim = chains.f.ndim - 1
    wide = torch.float32 if chains.x.device.type == "mps" else torch.float64
    gained = torch.zeros_like(chains.f, dtype=wide)
    for _ in range(steps):
        half = momentum + kick * chains.grad
        end = start_chains(f, chains.x + noise_std * half, dim=dim)
        momentum = half + kick * end.grad
        # The difference of kinetic energies is a quadrature of the gradient along the way. Summed
        # so, it keeps the digits that |p|² has lost to its size.
        x, x_end, before, after = (
            each.unsqueeze(-1).flatten(dim + 1).to(wide)
            for each in (chains.x, end.x, chains.grad, end.grad)
        )
        work = 0.5 * ((x_end - x) * (before + after)).sum(-1)
        work = work + 0.25 * step_size * (after.square() - before.square()).sum(-1)
        gained = gained + (end.f.to(wide) - chains.f.to(wide) - work)
        chains = end
    return chains, momentum, 2 * step_size / noise_std**2 * gained


def hmc_step(
    f: Callable[[Tensor], Tensor],
    chains: Chains,
    *,
    leapfrog_steps: int,
    step_size: float,
    noise_std: float,
    generator: torch.Generator | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[Chains, Proposal]:
    """One step of Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011, Figure 2).

    It leaves the density exp(o f), o = 2 step_size / noise_std**2, as it is. Step and noise are
    those of the Langevin step: with one leapfrog step the proposal is x + step_size * grad +
    noise_std * z, that of :func:`ebmguard.samplers.sgld_step`; with more, the same moves with the
    momentum kept. Masses are 1. Under a guard f is tempered, and so is the density.

    Chains are accepted or rejected each for itself. A proposal whose energy is not finite is
    rejected; a chain that starts at such an energy stays there.

    Args:
        f: negative energy, as in :func:`start_chains`.
        chains: the present state, from :func:`start_chains` or from the step before.
        leapfrog_steps: length of the trajectory, at least 1.
        step_size: factor of the gradient.
        noise_std: standard deviation of the noise.
        generator: source of randomness, on the device of the samples; None is PyTorch's global one.
        noise: momenta z ~ N(0, I) and u ~ U(0, 1), in the shapes of x and of f or broadcast to
            them, in the place of a generator. No random numbers are drawn then.

    Returns:
        the new state, detached, and what happened.

    Raises:
        ConfigError: settings that are not above 0, or both `noise` and `generator`.
        ShapeError: what f returns, see :func:`start_chains`.
    """
    _check_settings(leapfrog_steps=leapfrog_steps, step_size=step_size, noise_std=noise_std)
    x, device = chains.x, chains.x.device
    if noise is None:
        z = torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype)
        # In float32 at least: bfloat16 knows too few numbers below 1.
        wide = torch.promote_types(x.dtype, torch.float32)
        u = torch.rand(chains.f.shape, generator=generator, device=device, dtype=wide)
    else:
        z, u = noise
        check_noise(z, x.shape, generator)
        check_noise(u, chains.f.shape, generator)
    end, _, log_ratio = leapfrog(
        f, chains, z, steps=leapfrog_steps, step_size=step_size, noise_std=noise_std
    )
    divergent = ~torch.isfinite(log_ratio)
    acceptance = torch.where(divergent, 0.0, log_ratio.clamp(max=0.0).exp())
    accepted = u < acceptance
    chosen = accepted.reshape(accepted.shape + (1,) * (x.ndim - accepted.ndim))
    moved = Chains(
        torch.where(chosen, end.x, x),
        torch.where(accepted, end.f, chains.f),
        torch.where(chosen, end.grad, chains.grad),
    )
    return moved, Proposal(end, acceptance, accepted, divergent)


def hmc(
    f: Callable[[Tensor], Tensor],
    x0: Tensor,
    *,
    steps: int,
    leapfrog_steps: int,
    step_size: float,
    noise_std: float,
    generator: torch.Generator | None = None,
    dim: int = 0,
) -> tuple[Tensor, Tally]:
    """Run `steps` steps of :func:`hmc_step` from `x0`.

    The gradients stored in the parameters of `f` are not touched. f is evaluated
    ``1 + steps * leapfrog_steps`` times.

    Args:
        f: negative energy, one value for each sample: (B, ...) -> (B,), or (models, B, ...) ->
            (models, B) of an ensemble.
        x0: start points.
        steps: number of steps, at least 0.
        leapfrog_steps: leapfrog steps of each.
        step_size: factor of the gradient.
        noise_std: standard deviation of the noise.
        generator: source of randomness, on the device of `x0`; None is PyTorch's global one.
        dim: the batch dimension of `x0`; 1 for (models, B, ...).

    Returns:
        detached samples, in the shape of `x0`, and what became of the proposals.

    Raises:
        ConfigError, ShapeError: as for :func:`hmc_step`.
    """
    _check_settings(
        steps=steps, leapfrog_steps=leapfrog_steps, step_size=step_size, noise_std=noise_std
    )
    chains = start_chains(f, x0, dim=dim)
    acceptance = torch.zeros_like(chains.f)
    divergent = torch.zeros_like(chains.f, dtype=torch.int64)
    for _ in range(steps):
        chains, proposal = hmc_step(
            f,
            chains,
            leapfrog_steps=leapfrog_steps,
            step_size=step_size,
            noise_std=noise_std,
            generator=generator,
        )
        acceptance = acceptance + proposal.acceptance
        divergent = divergent + proposal.divergent
    return chains.x, Tally(acceptance / steps, divergent)


def _check_settings(
    *, leapfrog_steps: int, step_size: float, noise_std: float, steps: int = 0
) -> None:
    """Raise a ConfigError that names the setting and what was expected of it."""
    for name, count, least in (("steps", steps, 0), ("leapfrog_steps", leapfrog_steps, 1)):
        if not isinstance(count, int) or count < least:
            raise ConfigError(f"{name} is {count}, expected a whole number, {least} or more")
    for name, value in (("step_size", step_size), ("noise_std", noise_std)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{name} is {value}, expected a finite number above 0: the density that the chains "
                "are tested on is exp(o f) with o = 2 step_size / noise_std**2"
            )
