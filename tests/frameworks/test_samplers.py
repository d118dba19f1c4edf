"""MALA, HMC and SGLD against blackjax and torchebm, step by step on the same random numbers."""

from __future__ import annotations

import math
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from torchebm.core import BaseModel
from torchebm.samplers import LangevinDynamics

from ebmguard.samplers import hmc_step, mala_step, sgld, start_chains

pytestmark = pytest.mark.usefixtures("double_precision")

# A slope, a well on each side, and both coordinates in play.
CHAINS, SCALE = 4000, 1.25


def wells(x: Tensor) -> Tensor:
    u = x - 0.3 * x.flip(-1)
    return (-0.5 * (u.square() - 1).square() + 0.3 * x).sum(-1)


def wells_of_jax(x: Any) -> Any:
    u = x - 0.3 * x[..., ::-1]
    return (-0.5 * (u**2 - 1) ** 2 + 0.3 * x).sum(-1)


class Wells(BaseModel):
    """The energy U = -f of the same density."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return -SCALE * wells(x)


def starts() -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(CHAINS, 2, generator=rng, dtype=torch.float64)


def tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x))


# -- blackjax --------------------------------------------------------------------------------------
#
# Its MALA on the density exp(F) moves by ε ∇F + √(2ε) z: ours with F = o f, step_size = o ε and
# noise_std = √(2ε). Its HMC has steps of length ε on the same density: noise_std = ε and
# step_size = o ε² / 2.


def scaled(x: Any) -> Any:
    return SCALE * wells_of_jax(x)


def test_mala_steps_are_those_of_blackjax():
    epsilon, x0, rngs = 0.15, starts(), jax.random.split(jax.random.key(1), CHAINS)
    kernel = blackjax.mala(scaled, epsilon)
    states = jax.vmap(kernel.init)(jnp.asarray(x0.numpy()))
    theirs, info = jax.vmap(kernel.step)(rngs, states)
    # The numbers that it has drawn: one key for the proposal, one for the test.
    keys = jax.vmap(jax.random.split)(rngs)
    z = jax.vmap(lambda key: blackjax.util.generate_gaussian_noise(key, jnp.zeros(2)))(keys[:, 0])
    u = jax.vmap(jax.random.uniform)(keys[:, 1])
    chains, proposal = mala_step(
        wells,
        start_chains(wells, x0),
        step_size=SCALE * epsilon,
        noise_std=math.sqrt(2 * epsilon),
        noise=(tensor(z), tensor(u)),
    )
    torch.testing.assert_close(proposal.acceptance, tensor(info.acceptance_rate))
    assert torch.equal(proposal.accepted, tensor(info.is_accepted))
    assert 0.1 < proposal.accepted.double().mean() < 0.9
    torch.testing.assert_close(chains.x, tensor(theirs.position))
    torch.testing.assert_close(SCALE * chains.f, tensor(theirs.logdensity))


def test_hmc_steps_are_those_of_blackjax():
    epsilon, steps, x0 = 0.4, 4, starts()
    rngs = jax.random.split(jax.random.key(2), CHAINS)
    kernel = blackjax.hmc(scaled, epsilon, jnp.ones(2), steps)
    states = jax.vmap(kernel.init)(jnp.asarray(x0.numpy()))
    theirs, info = jax.vmap(kernel.step)(rngs, states)
    keys = jax.vmap(jax.random.split)(rngs)
    u = jax.vmap(jax.random.uniform)(keys[:, 1])
    chains, proposal = hmc_step(
        wells,
        start_chains(wells, x0),
        leapfrog_steps=steps,
        step_size=SCALE * epsilon**2 / 2,
        noise_std=epsilon,
        noise=(tensor(info.momentum), tensor(u)),
    )
    torch.testing.assert_close(
        proposal.acceptance, tensor(info.acceptance_rate), rtol=1e-6, atol=1e-9
    )
    assert torch.equal(proposal.accepted, tensor(info.is_accepted))
    assert 0.1 < proposal.accepted.double().mean() < 0.9
    torch.testing.assert_close(chains.x, tensor(theirs.position), rtol=1e-7, atol=1e-9)


# -- torchebm --------------------------------------------------------------------------------------
#
# Its Langevin dynamics moves by -η ∇U + √(2η) z, its HMC has steps of length ε and unit masses.


@pytest.mark.parametrize(
    ("eta", "steps", "clamp"), [(0.03, 9, {}), (0.05, 5, {"clamp": (-0.8, 1.1)})]
)
def test_langevin_steps_are_those_of_torchebm(eta, steps, clamp):
    x0 = starts().clamp(-1.5, 1.5)  # farther out its steps are unstable
    sampler = LangevinDynamics(
        Wells(), step_size=eta, noise_scale=1.0, dtype=torch.float64, **clamp
    )
    rng = torch.Generator().manual_seed(5)
    theirs = sampler.sample(x0.clone(), n_steps=steps, generator=rng)
    rng.manual_seed(5)
    settings: Any = {"step_size": SCALE * eta, "noise_std": math.sqrt(2 * eta), **clamp}
    ours = sgld(wells, x0, steps=steps, **settings, generator=rng)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
