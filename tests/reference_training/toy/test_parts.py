"""Distributions and grids against scipy; members, networks, samplers and scenarios of toys."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import nn
from torch.nn.functional import softplus

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS, Rings
from ebmguard.reference_training.toy.grid import Grid, bandwidth, blurred, kde
from ebmguard.reference_training.toy.members import Members, averaged_loss
from ebmguard.reference_training.toy.network import EnsembleMLP
from ebmguard.reference_training.toy.sampler import make_sampler
from ebmguard.reference_training.toy.scenario import SAMPLERS, SCENARIOS
from tests.reference_training.parts import CPU, rng


def radial(r, log_density):
    """Density of the radius, by the density in the plane."""
    point = torch.tensor([r * math.cos(0.3), r * math.sin(0.3)], dtype=torch.float64)
    return 2 * math.pi * r * math.exp(log_density(point))


@pytest.mark.parametrize("form", ["log_density", "pictured_log_density"])
def test_ring_densities_integrate_to_one_and_differ_as_radii_do(form):
    of_all = (getattr(DISTRIBUTIONS["circles"], form),)
    total, _ = integrate.quad(radial, 0, 6, of_all, points=[1, 2, 3, 4], limit=200)
    assert total == pytest.approx(1, abs=1e-7)
    rings = Rings(radii=(1.0,), weights=(1,))
    inside = torch.tensor([0.0, 0.85], dtype=torch.float64)
    ratio = (rings.log_density(inside) - rings.pictured_log_density(inside)).exp()
    assert ratio.item() == pytest.approx(1 / 0.85)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_density_is_exactly_that_of_the_sampler(name):
    """Chi-squared over the cells of a coarse grid."""
    distribution = DISTRIBUTIONS[name]
    n, coarse = 200_000, 12
    x = distribution.sample(n, rng(1)).double()
    fine = Grid.of(distribution, 600)
    centres = (fine.points * (599 / 600)).clone()  # midpoints of 600 cells a side
    width = 2 * distribution.limit / 600
    masses = distribution.log_density(centres).exp() * width**distribution.dim
    side = 2 * distribution.limit / coarse

    def cell_of(points):
        index = ((points + distribution.limit) / side).floor().clamp(0, coarse - 1).long()
        return index[:, 0] if distribution.dim == 1 else index[:, 1] * coarse + index[:, 0]

    expected = torch.zeros(coarse**distribution.dim, dtype=torch.float64)
    expected.index_add_(0, cell_of(centres), masses)
    seen = torch.bincount(cell_of(x), minlength=len(expected)).double()
    used = expected * n > 20
    chi2 = ((seen - n * expected).square() / (n * expected))[used].sum().item()
    # What falls outside the grid lands in the border cells: 1e-4 of the mass, below the noise.
    assert stats.chi2.sf(chi2, int(used.sum()) - 1) > 1e-4


def test_density_can_be_differentiated_after_use_under_inference_mode():
    gmm = replace(DISTRIBUTIONS["gmm"], std=0.123)
    with torch.inference_mode():
        gmm.log_density(torch.zeros(1, 2))
    x = torch.tensor([[0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gmm.log_density, x)


def whitened(x, std):
    """Samples whose covariance is std² I: scipy's kernel, which has that shape, is isotropic."""
    x = x - x.mean(0)
    return std * np.linalg.solve(np.linalg.cholesky(np.atleast_2d(np.cov(x.T))), x.T).T


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_is_the_density_estimate_of_scipy(name):
    distribution = DISTRIBUTIONS[name]
    grid = Grid.of(distribution, 40)
    x = whitened(distribution.sample(500, rng()).double().numpy(), distribution.limit / 2)
    oracle = stats.gaussian_kde(x.T, bw_method=0.1)(grid.points.numpy().T)
    ours = kde(torch.from_numpy(x), grid, 0.1 * distribution.limit / 2)
    assert ours.dtype == torch.float64
    # Relative, far from all samples too: nothing here is a difference.
    np.testing.assert_allclose(ours, oracle, rtol=1e-9, atol=0)


def test_kernels_have_their_published_widths_and_samples_outside_their_mass():
    for name, published in (("gmm", 0.0723), ("circles", 0.1455)):
        distribution = DISTRIBUTIONS[name]
        equal = replace(distribution, weights=(1,) * len(distribution.weights))
        assert bandwidth(equal, Grid.of(equal)) == pytest.approx(published, abs=5e-5)
    grid = Grid.of(DISTRIBUTIONS["gmm"], 100)
    samples = torch.tensor([[0.0, 0.2], [1e30, 0.0], [0.0, -50.0], [0.3, 0.0]])
    density = kde(samples, grid, 0.1)
    assert density.sum().item() * grid.cell == pytest.approx(0.5)


def test_blurred_rings_are_those_of_the_rice_distribution():
    """A point at radius r, blurred, has a radius of Rice's law."""
    grid = Grid.of(DISTRIBUTIONS["circles"])
    width = 0.1455
    density = blurred(DISTRIBUTIONS["circles"], grid, width)
    for cell in (100 * 200 + 100, 100 * 200 + 130, 90 * 200 + 121, 0, 170 * 200 + 40):
        rho = grid.points[cell].norm().item()

        def rice(r, rho=rho):
            radial = sum(math.exp(-(((r - k) / 0.15) ** 2) / 2) for k in (1, 2, 3, 4))
            radial /= 4 * 0.15 * math.sqrt(2 * math.pi)
            kernel = math.exp(-((rho - r) ** 2) / (2 * width**2)) * special.ive(
                0, rho * r / width**2
            )
            return radial * kernel / (2 * math.pi * width**2)

        exact, _ = integrate.quad(rice, 0, 8, points=[1, 2, 3, 4, rho], limit=500, epsabs=0)
        assert density[cell].item() == pytest.approx(exact, rel=1e-6)


# -- members, networks and samplers ------------------------------------------------------------


def test_schedules_move_and_an_average_samples_at_its_mean_beta():
    strength = Members.of(["0.2", "0:0.8"], ["default"], [0]).strength(10.0, 100, CPU)
    assert strength["beta_star"](0).tolist() == [2.0, 0.0]
    assert strength["beta_star"](50).tolist() == pytest.approx([2.0, 4.0])
    members = Members.of(["0.1+0.5", "0.4"], ["default"], [0])
    starts, slopes = members.exponents(10.0, 100, CPU)
    assert (members.terms, starts.tolist()) == (2, [[1.0, 4.0], [5.0, 4.0]])
    assert not slopes.any()
    assert members.strength(10.0, 100, CPU)["beta_star"].tolist() == [3.0, 4.0]
    moving = Members.of(["0:0.2+0.4:0.8"], ["default"], [0])
    assert moving.strength(10.0, 100, CPU)["beta_star"](50).tolist() == pytest.approx([3.5])


def test_an_average_of_losses_is_that_of_every_member_by_itself():
    rng = torch.Generator().manual_seed(0)
    f_pos, f_neg = (torch.randn(4, n, generator=rng, dtype=torch.float64) for n in (5, 7))
    exponents = torch.tensor([[0.5, 1.0, 0.5, 1.0], [2.0, -1.0, 2.0, -1.0]], dtype=torch.float64)
    expected = 0.0
    for own in exponents:
        for g, beta in enumerate(own):
            log_sum = (beta * f_neg[g]).logsumexp(0)
            if g < 2:  # Eq. 8
                expected += softplus(log_sum - beta * f_pos[g]).mean() / beta / 2
            else:  # Eq. 7
                expected += (log_sum / beta - f_pos[g].mean()) / 2
    found = averaged_loss(f_pos, f_neg, exponents, ("default", "no_pos"))
    torch.testing.assert_close(found, expected)


def test_starts_out_as_the_layers_of_torch_do():
    """The two-sample Kolmogorov-Smirnov test against nn.Linear, and its bounds."""
    ensemble = EnsembleMLP(range(20))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for i, weight in enumerate(ensemble.weights):
            layers = [nn.Linear(*weight.shape[1:]) for _ in range(20)]
            pairs = [(weight, torch.cat([layer.weight.detach().flatten() for layer in layers]))]
            if i < len(ensemble.biases):
                drawn = torch.cat([layer.bias.detach() for layer in layers])
                pairs.append((ensemble.biases[i], drawn))
            for mine, theirs in pairs:
                values = mine.detach().flatten().numpy()
                assert abs(values).max() <= 1 / math.sqrt(weight.shape[1])
                assert stats.ks_2samp(values, theirs.numpy()).pvalue > 1e-3


SETTINGS = SCENARIOS["gmm-default"]


def bowl(x):
    """With the scenario's output scale the density is N(0, 1)."""
    return -x.square().sum(-1) / (2 * SETTINGS.output_scale)


def test_a_broken_step_is_another_langevin_step():
    """Their drift and their noise still belong together, as o = 2 step_size / noise_std²."""
    x0, noise = torch.randn(2, 2, 5, 2, generator=rng())
    one = replace(SETTINGS, sgld_steps=1)
    for name in ("good", "exploding", "stuck"):
        step = SAMPLERS[name].step
        other = replace(one, step_size=step, noise_std=0.1 * step**0.5)
        assert other.output_scale == pytest.approx(SETTINGS.output_scale)
        moved = make_sampler(one, name)(bowl, x0, noise[None])
        expected = x0 - step * x0 / SETTINGS.output_scale + 0.1 * step**0.5 * noise
        torch.testing.assert_close(moved, expected)


DATA = tuple(DISTRIBUTIONS)


def differences(name, base):
    one, other = (asdict(SCENARIOS[each]) for each in (name, base))
    return {key: value for key, value in one.items() if value != other[key]}


@pytest.mark.parametrize("data", DATA)
def test_the_published_changes_and_no_others(data):
    base = SCENARIOS[f"{data}-default"]
    setups = ("long", "shifted", "restricted", "degenerate")
    changes = {setup: differences(f"{data}-{setup}", f"{data}-default") for setup in setups}
    assert changes["long"] == {"iterations": 2 * base.iterations}  # Figure 5
    assert changes["restricted"] == {"n_neg": 3, "sgld_steps": 3}  # Figures 10 and 11
    assert changes["degenerate"] == {"n_neg": 1, "sgld_steps": 0}  # Figures 8 and 9
    shifted = changes["shifted"]  # Figure 6
    assert set(shifted) == {"init_mean", "init_std", "step_size", "noise_std"}
    assert shifted["init_std"] == base.init_std / 2
    # The step of Langevin's equation is noise_std**2: its drift and noise grow together.
    assert shifted["noise_std"] ** 2 == pytest.approx(10 * base.noise_std**2)
    assert shifted["step_size"] == pytest.approx(10 * base.step_size)
    assert base.output_scale == pytest.approx(2 / base.noise_std**2)
    assert shifted["init_mean"] > 0  # the bottom right is (+, +): in the pictures y grows downward
    proposal = SCENARIOS[f"{data}-proposal"]
    assert (proposal.sgld_steps, proposal.n_pos, proposal.n_neg) == (0, 100, 100)
    assert proposal.iterations == (4 if data == "circles" else 2) * base.iterations
    assert proposal.output_scale == pytest.approx(200)
    assert proposal.lr_end == pytest.approx(proposal.lr / 100)


def test_the_learning_rate_is_that_of_torchs_exponential_decay():
    scenario = replace(SCENARIOS["gmm-proposal"], iterations=50)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=scenario.lr)
    gamma = (scenario.lr_end / scenario.lr) ** (1 / 50)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for step in range(51):
        assert scenario.lr_at(step) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert scenario.lr_at(50) == pytest.approx(scenario.lr_end)
