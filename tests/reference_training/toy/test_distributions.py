"""The distributions and densities on the published grid, against scipy and closed forms."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS, GaussianMixture, Rings
from ebmguard.reference_training.toy.grid import Grid, bandwidth, blurred, kde
from tests.reference_training.parts import rng


def test_the_published_settings():
    gmm, circles = DISTRIBUTIONS["gmm"], DISTRIBUTIONS["circles"]
    assert (gmm.dim, gmm.limit, gmm.kde_factor) == (2, 1.6, 0.1)
    assert (circles.dim, circles.limit, circles.kde_factor) == (2, 4.6, 0.075)
    assert isinstance(gmm, GaussianMixture)
    assert gmm.centres[0] == (1.0, 0.0)
    np.testing.assert_allclose(gmm.centres[3], (-(0.5**0.5), 0.5**0.5))


def test_a_mixture_on_the_line_is_that_of_scipy():
    x = np.linspace(-1.6, 1.6, 31)
    parts = [(0.4, -1), (0.1, -1 / 3), (0.3, 1 / 3), (0.2, 1)]
    density = sum(w * stats.norm(centre, 0.15).pdf(x) for w, centre in parts)
    ours = DISTRIBUTIONS["mixture1d"].log_density(torch.from_numpy(x).unsqueeze(-1))
    np.testing.assert_allclose(ours, np.log(density), rtol=1e-12)


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


def test_radii_below_zero_are_counted_at_the_opposite_angle():
    rings = Rings(radii=(0.1,), weights=(1,), std=0.15)
    x = rings.sample(200_000, rng())
    radius = x.norm(dim=-1)
    edges = np.linspace(0, 0.6, 7)
    seen, _ = np.histogram(radius.numpy(), edges)
    for low, high, count in zip(edges[:-1], edges[1:], seen, strict=True):
        mass, _ = integrate.quad(radial, low, high, args=(rings.log_density,))
        assert count == pytest.approx(200_000 * mass, abs=5 * math.sqrt(200_000 * mass))


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


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_components_add_up_and_carry_their_weights(name):
    distribution = DISTRIBUTIONS[name]
    grid = Grid.of(distribution, 201)  # through the pole of the rings
    parts = distribution.component_log_densities(grid.points)
    torch.testing.assert_close(parts.logsumexp(-1), distribution.log_density(grid.points))
    weights = torch.tensor(distribution.weights, dtype=torch.float64)
    torch.testing.assert_close(
        parts.exp().sum(0) * grid.cell, weights / weights.sum(), rtol=2e-3, atol=0
    )


def test_density_can_be_differentiated_after_use_under_inference_mode():
    gmm = dataclasses.replace(DISTRIBUTIONS["gmm"], std=0.123)
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


@pytest.mark.parametrize("name", ["gmm", "mixture1d"])
def test_members_are_estimated_apart(name):
    distribution = DISTRIBUTIONS[name]
    grid = Grid.of(distribution, 30)
    samples = distribution.sample(60, rng()).reshape(2, 3, 10, distribution.dim)
    samples[0, 1, 4, 0] = torch.nan
    samples[1, 2, 9, -1] = -torch.inf
    together = kde(samples, grid, 0.1)
    assert together.shape == (2, 3, 30**distribution.dim)
    for i in range(2):
        for j in range(3):
            if (i, j) in ((0, 1), (1, 2)):
                assert together[i, j].isnan().all()
            else:
                assert together[i, j].equal(kde(samples[i, j], grid, 0.1))


def test_kernels_have_their_published_widths_and_samples_outside_their_mass():
    for name, published in (("gmm", 0.0723), ("circles", 0.1455)):
        distribution = DISTRIBUTIONS[name]
        equal = dataclasses.replace(distribution, weights=(1,) * len(distribution.weights))
        assert bandwidth(equal, Grid.of(equal)) == pytest.approx(published, abs=5e-5)
    grid = Grid.of(DISTRIBUTIONS["gmm"], 100)
    samples = torch.tensor([[0.0, 0.2], [1e30, 0.0], [0.0, -50.0], [0.3, 0.0]])
    density = kde(samples, grid, 0.1)
    assert density.sum().item() * grid.cell == pytest.approx(0.5)


@pytest.mark.parametrize(("name", "resolution"), [("gmm", 20), ("mixture1d", 200)])
def test_blurred_mixture_is_the_wider_mixture(name, resolution):
    distribution = DISTRIBUTIONS[name]
    grid = Grid.of(distribution, resolution)
    wider = dataclasses.replace(distribution, std=math.hypot(0.15, 0.07))
    torch.testing.assert_close(
        blurred(distribution, grid, 0.07), wider.log_density(grid.points).exp(), rtol=1e-9, atol=0
    )


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


def test_grids_are_the_published_one_row_by_row_and_one_dimensional():
    grid = Grid.of(DISTRIBUTIONS["gmm"])
    axis = np.linspace(-1.6, 1.6, 200)
    np.testing.assert_allclose(grid.axis, axis)
    x, y = np.meshgrid(axis, axis)  # numpy's own convention: z[i_y, j_x]
    np.testing.assert_allclose(grid.points[:, 0].reshape(grid.shape), x)
    np.testing.assert_allclose(grid.points[:, 1].reshape(grid.shape), y)
    assert grid.cell == pytest.approx((3.2 / 199) ** 2)
    grid = Grid.of(DISTRIBUTIONS["mixture1d"], 50)
    assert grid.shape == (50,)
    assert grid.points.shape == (50, 1)
    assert grid.cell == pytest.approx(3.2 / 49)
