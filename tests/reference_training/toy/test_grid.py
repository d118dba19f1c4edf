"""The published grid, and densities on it, against scipy and closed forms."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.grid import Grid, bandwidth, blurred, kde


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def whitened(x, std):
    """Samples whose covariance is std² I: scipy's kernel, which has that shape, is isotropic."""
    x = x - x.mean(0)
    return std * np.linalg.solve(np.linalg.cholesky(np.atleast_2d(np.cov(x.T))), x.T).T


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_is_the_density_estimate_of_scipy(name):
    distribution = DISTRIBUTIONS[name]
    grid = Grid.of(distribution, 40)
    x = whitened(distribution.sample(500, generator()).double().numpy(), distribution.limit / 2)
    oracle = stats.gaussian_kde(x.T, bw_method=0.1)(grid.points.numpy().T)
    ours = kde(torch.from_numpy(x), grid, 0.1 * distribution.limit / 2)
    assert ours.dtype == torch.float64
    # Relative, far from all samples too: nothing here is a difference.
    np.testing.assert_allclose(ours, oracle, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["gmm", "mixture1d"])
def test_members_are_estimated_apart(name):
    distribution = DISTRIBUTIONS[name]
    grid = Grid.of(distribution, 30)
    samples = distribution.sample(60, generator()).reshape(2, 3, 10, distribution.dim)
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


def test_samples_outside_take_their_mass_with_them():
    grid = Grid.of(DISTRIBUTIONS["gmm"], 100)
    samples = torch.tensor([[0.0, 0.2], [1e30, 0.0], [0.0, -50.0], [0.3, 0.0]])
    density = kde(samples, grid, 0.1)
    assert density.sum().item() * grid.cell == pytest.approx(0.5)


def test_published_kernel_widths():
    for name, published in (("gmm", 0.0723), ("circles", 0.1455)):
        distribution = DISTRIBUTIONS[name]
        equal = dataclasses.replace(distribution, weights=(1,) * len(distribution.weights))
        assert bandwidth(equal, Grid.of(equal)) == pytest.approx(published, abs=5e-5)


@pytest.mark.parametrize("name", ["gmm", "mixture1d"])
@pytest.mark.parametrize("resolution", [20, 200])
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


def test_is_the_published_grid_row_by_row():
    grid = Grid.of(DISTRIBUTIONS["gmm"])
    axis = np.linspace(-1.6, 1.6, 200)
    np.testing.assert_allclose(grid.axis, axis)
    x, y = np.meshgrid(axis, axis)  # numpy's own convention: z[i_y, j_x]
    np.testing.assert_allclose(grid.points[:, 0].reshape(grid.shape), x)
    np.testing.assert_allclose(grid.points[:, 1].reshape(grid.shape), y)
    assert grid.cell == pytest.approx((3.2 / 199) ** 2)


def test_in_one_dimension():
    grid = Grid.of(DISTRIBUTIONS["mixture1d"], 50)
    assert grid.shape == (50,)
    assert grid.points.shape == (50, 1)
    assert grid.cell == pytest.approx(3.2 / 49)
