"""HMC and MALA: detailed balance in exact numbers; what is not finite, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal

from ebmguard.errors import ConfigError, ShapeError
from ebmguard.samplers import Proposal, hmc, hmc_step, mala, mala_step, start_chains
from ebmguard.samplers.hmc import leapfrog
from tests.samplers.parts import bowl, normals, scale_of, seeded, wells

# -- exact: detailed balance, reversibility, energy ------------------------------------------------

sizes: Any = {
    "step_size": st.floats(0.01, 0.6),
    "noise_std": st.floats(0.1, 1.0),
    "energy": st.sampled_from([bowl, wells]),
    "seed": st.integers(0, 2**32),
}


def balanced(there: Tensor, back: Tensor, ratio: Tensor, **tolerance: Any) -> None:
    """One of two ways is accepted for sure, the other by the ratio; log α has lost digits at 0."""
    assert (torch.maximum(there, back) == 1).all()
    torch.testing.assert_close(there, ratio.clamp(max=0).exp(), **tolerance)
    torch.testing.assert_close(back, (-ratio).clamp(max=0).exp(), **tolerance)


@given(**sizes)
def test_mala_is_in_detailed_balance(step_size, noise_std, energy, seed):
    """π(x) q(y|x) α(x, y) = π(y) q(x|y) α(y, x), the densities written out."""
    x, y = normals(2, 9, 2, seed=seed)
    settings: Any = {"step_size": step_size, "noise_std": noise_std}
    one = torch.zeros(9, dtype=torch.float64)

    def flow(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of π q, and α, from start to end."""
        chains = start_chains(energy, start)
        mean = start + step_size * chains.grad
        _, proposal = mala_step(energy, chains, **settings, noise=((end - mean) / noise_std, one))
        torch.testing.assert_close(proposal.chains.x, end, rtol=0, atol=1e-12)
        log_q = Normal(mean, noise_std).log_prob(end).sum(-1)
        return scale_of(**settings) * energy(start) + log_q, proposal.acceptance

    (there, accepted_there), (back, accepted_back) = flow(x, y), flow(y, x)
    balanced(accepted_there, accepted_back, back - there, rtol=1e-8, atol=1e-12)


@given(**sizes, steps=st.integers(1, 6))
def test_leapfrog_loses_what_the_hamiltonian_says_and_goes_back_the_way_it_came(
    step_size, noise_std, energy, seed, steps
):
    x, momentum = 0.5 * normals(2, 9, 2, seed=seed)
    settings: Any = {"step_size": 0.1 * step_size, "noise_std": 0.3 * noise_std}
    end, p, gained = leapfrog(energy, start_chains(energy, x), momentum, steps=steps, **settings)
    scale = scale_of(**settings)
    before = -scale * energy(x) + 0.5 * momentum.square().sum(-1)
    after = -scale * energy(end.x) + 0.5 * p.square().sum(-1)
    torch.testing.assert_close(gained, before - after, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(end.f, energy(end.x))
    again, back, lost = leapfrog(energy, end, -p, steps=steps, **settings)
    for found, expected in ((again.x, x), (back, -momentum), (lost, -gained)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_float32_loses_no_more_than_f_itself_has_rounded():
    """Of images, against the same trajectory in float64; momenta lose eps for each root of all."""
    scale, noise_std, height, steps = 20_000.0, 0.01, 0.05, 3
    x, z = normals(2, 32, 3072).float()
    mixing, weights = normals(3072, 64, seed=1) / 3072**0.5, height * normals(64, seed=2)

    def f(x: Tensor) -> Tensor:
        bowl, bumps = x.square().sum(1) / 512, torch.tanh(x @ mixing.to(x)) @ weights.to(x)
        found: Tensor = bumps - height * bowl
        return found

    settings: Any = {"steps": steps, "noise_std": noise_std, "step_size": scale * noise_std**2 / 2}
    end, _, gained = leapfrog(f, start_chains(f, x), z, **settings)
    _, _, expected = leapfrog(f, start_chains(f, x.double()), z.double(), **settings)
    rounded = scale * torch.stack([f(at).double() - f(at.double()) for at in (x, end.x)])
    assert expected.abs().median() > 1e3 * (gained - expected).abs().median()
    momenta = torch.finfo(torch.float32).eps * (steps * 3072) ** 0.5
    assert (gained - expected).square().mean().sqrt() < 2 * rounded.square().mean().sqrt() + momenta


@given(**sizes, steps=st.integers(1, 6))
def test_hmc_is_in_detailed_balance(step_size, noise_std, energy, seed, steps):
    """π(x) N(p) α = π(x') N(p') α' between a start and its end with the momentum turned round."""
    x, momentum = normals(2, 9, 2, seed=seed)
    settings: Any = {"step_size": 0.3 * step_size, "noise_std": noise_std}
    scale = scale_of(**settings)
    one = torch.zeros(9, dtype=torch.float64)
    start = start_chains(energy, x)
    end, p, _ = leapfrog(energy, start, momentum, steps=steps, **settings)
    settings["leapfrog_steps"] = steps
    _, there = hmc_step(energy, start, **settings, noise=(momentum, one))
    _, back = hmc_step(energy, end, **settings, noise=(-p, one))

    def log_density(x: Tensor, p: Tensor) -> Tensor:
        log_p: Tensor = scale * energy(x) + Normal(0.0, 1.0).log_prob(p).sum(-1)
        return log_p

    sane = (back.chains.x - x).abs().amax(-1) < 1e-8  # far out on the wells, digits are lost
    ratio = (log_density(end.x, p) - log_density(x, momentum))[sane]
    balanced(there.acceptance[sane], back.acceptance[sane], ratio, rtol=1e-6, atol=1e-9)


def test_rare_moves_are_as_rare_in_half_precision():
    """Accepted with probability exp(-6), less than what bfloat16 knows below 1."""

    def cliff(x: Tensor) -> Tensor:
        return (0 * x - 6.0 * (x != 0)).sum(1)

    n = 100_000
    settings: Any = {"step_size": 0.08, "noise_std": 0.4}  # o = 1
    start = start_chains(cliff, torch.zeros(n, 1, dtype=torch.bfloat16))
    _, proposal = mala_step(cliff, start, **settings, generator=seeded(0))
    rate = math.exp(-6)
    moves = proposal.chains.x.squeeze(1) != 0  # rounded noise may be 0
    assert moves.double().mean() > 0.99
    acceptance = proposal.acceptance[moves]
    torch.testing.assert_close(acceptance, torch.full_like(acceptance, rate, dtype=torch.float64))
    accepted = proposal.accepted[moves].double().mean().item()
    assert abs(accepted - rate) < 5 * math.sqrt(rate / n)


def test_a_chain_goes_on_from_its_proposal_or_stays():
    settings: Any = {"step_size": 0.1, "noise_std": 0.6, "leapfrog_steps": 2}
    start = start_chains(wells, normals(500, 2))
    noise = normals(500, 2, seed=1), torch.rand(500, dtype=torch.float64)
    moved, proposal = hmc_step(wells, start, **settings, noise=noise)
    assert torch.equal(proposal.accepted, noise[1] < proposal.acceptance)
    assert 50 < proposal.accepted.sum() < 450
    for now, then, proposed in zip(moved, start, proposal.chains, strict=True):
        assert torch.equal(now[proposal.accepted], proposed[proposal.accepted])
        assert torch.equal(now[~proposal.accepted], then[~proposal.accepted])


# -- energies that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "leapfrog_steps"), [(math.nan, 1), (math.inf, 4), (-math.inf, 4)])
def test_proposals_without_a_finite_energy_are_rejected_and_counted(lost, leapfrog_steps):
    def walled(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 1, lost, bowl(x))

    rng = seeded(2)
    chains = start_chains(walled, torch.zeros(300, 2, dtype=torch.float64))
    seen = torch.zeros(300, dtype=torch.int64)
    settings: Any = {"leapfrog_steps": leapfrog_steps, "step_size": 0.3, "noise_std": 0.7}
    for _ in range(10):
        chains, proposal = hmc_step(walled, chains, **settings, generator=rng)
        assert all(part.isfinite().all() for part in chains)
        assert not (proposal.divergent & proposal.accepted).any()
        assert (proposal.acceptance[proposal.divergent] == 0).all()
        assert proposal.divergent[proposal.chains.x[:, 0] > 1].all()
        seen += proposal.divergent
    assert chains.x[:, 0].max() <= 1
    assert seen.sum() > 100


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_trajectory_that_leaps_over_a_lost_energy_is_rejected(lost):
    """Flat on both sides of a band: it would end where it began in energy. With u = 0."""

    def band(x: Tensor) -> Tensor:
        return torch.where(x.abs() < 0.5, lost, 0 * x).sum(1)

    start = start_chains(band, torch.full((1, 1), -1.0))
    for way, is_over in ((1.0, True), (-1.0, False)):
        noise = torch.full((1, 1), way), torch.zeros(1)
        settings: Any = {"leapfrog_steps": 2, "step_size": 0.5, "noise_std": 1.0, "noise": noise}
        _, proposal = hmc_step(band, start, **settings)
        assert proposal.chains.f == 0
        assert proposal.divergent == is_over
        assert proposal.accepted != is_over


def test_a_chain_that_starts_without_a_finite_energy_stays():
    x0 = torch.tensor([[5.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    seen: list[Proposal] = []

    def walled(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 4, torch.nan, bowl(x))

    x = mala(walled, x0, steps=5, step_size=0.1, noise_std=0.4, on_step=seen.append)
    assert torch.equal(x[0], x0[0])
    assert not torch.equal(x[1], x0[1])
    assert [step.divergent.tolist() for step in seen] == [[True, False]] * 5
    assert all(step.acceptance[0] == 0 for step in seen)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "returned", "dim"),
    [
        ((4, 2), (4, 1), 0),
        ((4, 3, 5, 5), (4, 3), 0),  # three heads, not three chains for each image
        ((4, 2), (), 0),
        ((3, 4, 2), (3, 4), 0),
        ((3, 4, 2), (4,), 1),
    ],
)
def test_refuses_energies_that_are_not_one_number_for_each_sample(shape, returned, dim):
    def f(x: Tensor) -> Tensor:
        return x.sum() + torch.zeros(returned)

    with pytest.raises(ShapeError, match="expected one number for each sample"):
        start_chains(f, torch.zeros(shape), dim=dim)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"leapfrog_steps": 0}, "leapfrog_steps is 0"),
        ({"leapfrog_steps": 1.5}, "leapfrog_steps= is 1.5; expected a whole number"),
        ({"noise_std": 0.0}, "noise_std is 0.0"),
    ],
)
def test_refuses_settings_of_its_own(settings, message):
    settings = {"steps": 1, "leapfrog_steps": 1, "step_size": 0.1, "noise_std": 0.1, **settings}
    with pytest.raises(ConfigError, match=message):
        hmc(bowl, normals(2, 2), **settings)
