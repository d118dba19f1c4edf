"""Densities and bits: against closed forms, an integral that must be one, and shares of samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.flow.flow_map import flow
from ebmguard.reference_training.shortrun.flow.likelihood import (
    bits_per_dim,
    dequantise,
    extended_log_density,
    inside_cube,
    log_density,
    noise_bits,
    uniform_bits,
)
from ebmguard.reference_training.shortrun.flow.logdet import log_abs_det

WAVES = torch.tensor([[1.6, 0.4], [-0.7, 1.2], [0.3, -1.9]], dtype=torch.float64)
PHASES = torch.tensor([0.3, 1.1, -0.6], dtype=torch.float64)
HEIGHTS = torch.tensor([0.35, 0.3, 0.25], dtype=torch.float64)
STEPS, STEP_SIZE = 4, 0.3


def waves(x: Tensor) -> Tensor:
    """A smooth f on the plane. Its Hessian is at most 2.7, so that every step is one-to-one."""
    return (x @ WAVES.T + PHASES).cos() @ HEIGHTS


def test_densities_of_a_linear_flow_are_known() -> None:
    # f quadratic: M(z) = P z + q. Uniform starts fill a parallelepiped of volume 2^D |det P|;
    # Gaussian starts make a Gaussian of covariance P P'.
    torch.manual_seed(3)
    root = torch.randn(4, 4, dtype=torch.float64)
    curvature, slope = root @ root.T / 2, torch.randn(4, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return x @ slope - 0.5 * ((x @ curvature) * x).sum(1)

    step = torch.eye(4, dtype=torch.float64) - 0.2 * curvature
    power = torch.linalg.matrix_power(step, 7)
    z = torch.rand(5, 4, dtype=torch.float64) * 2 - 1
    found = log_abs_det(f, z, steps=7, step_size=0.2)
    volume = 2**4 * torch.linalg.det(power).abs()
    assert abs(float(volume.log())) > 1
    torch.testing.assert_close(
        log_density(z, found.total), -volume.log().expand(5), rtol=1e-9, atol=1e-9
    )
    shift = flow(f, torch.zeros(1, 4, dtype=torch.float64), steps=7, step_size=0.2)[0]
    gaussian = torch.distributions.MultivariateNormal(shift, power @ power.T)
    of_starts = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1)
    torch.testing.assert_close(of_starts - found.total, gaussian.log_prob(found.x))


def test_the_density_of_a_curved_flow_integrates_to_one() -> None:
    x, area = cells(110)
    density = density_at(x)
    integral = float(density.sum() * area)
    print(f"integral of p over the plane: {integral:.5f}")
    assert integral == pytest.approx(1, abs=0.01)
    # A flow that leaves volumes as they are would pass with any sign and any number of steps.
    held = density[density > 0]
    assert float(held.max() / held.min()) > 5


def test_its_mass_is_where_the_samples_are() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.rand((100_000, 2), dtype=torch.float64, generator=generator) * 2 - 1
    samples = flow(waves, z, steps=STEPS, step_size=STEP_SIZE)
    x, area = cells(110)
    density = density_at(x)
    for axis in (0, 1):
        middles = x[:, axis].unique()
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            # Between two rows of cells, so that none is cut.
            row = int((middles < samples[:, axis].quantile(share)).sum())
            cut = (middles[row - 1] + middles[row]) / 2
            mass = float(density[x[:, axis] < cut].sum() * area)
            drawn = float((samples[:, axis] < cut).double().mean())
            print(f"x_{axis} < {cut:.2f}: mass {mass:.4f}, of the samples {drawn:.4f}")
            assert mass == pytest.approx(drawn, abs=0.01)


def test_outside_of_the_cube_the_density_is_zero() -> None:
    z = torch.tensor([[1.0, -1.0], [1.0000001, 0.0], [0.3, -7.0]], dtype=torch.float64)
    assert inside_cube(z).tolist() == [True, False, False]
    log_det = torch.tensor([0.5, -math.inf, math.inf], dtype=torch.float64)
    assert log_density(z, log_det).tolist() == [-2 * math.log(2) - 0.5, -math.inf, -math.inf]
    extended = extended_log_density(torch.tensor([0.5, 0.1]), size=2)
    torch.testing.assert_close(extended, torch.tensor([-0.5, -0.1]) - 2 * math.log(2))
    nowhere = bits_per_dim(log_density(z, log_det), size=2, levels=255)
    assert nowhere[1:].tolist() == [math.inf, math.inf]


@settings(deadline=None)
@given(
    size=st.integers(1, 4000),
    levels=st.integers(1, 255),
    stretch=st.floats(1e-3, 1e3),
)
def test_bits_are_those_of_a_box_in_levels(size: int, levels: int, stretch: float) -> None:
    # A flow x = stretch * z fills a box of 2 * stretch a side, levels * stretch in levels.
    log_det = torch.tensor([size * math.log(stretch)], dtype=torch.float64)
    log_p = log_density(torch.zeros(1, size, dtype=torch.float64), log_det)
    bits = bits_per_dim(log_p, size=size, levels=levels)
    torch.testing.assert_close(bits.item(), math.log2(levels * stretch), rtol=1e-9, atol=1e-9)


def test_published_numbers_in_these_units() -> None:
    # 4.12 bits of 32x32x3 images of bytes are a mean log2|det| / D of -3.87.
    size = 3 * 32 * 32
    log_det = torch.tensor([-3.874 * size * math.log(2)], dtype=torch.float64)
    bits = bits_per_dim(extended_log_density(log_det, size=size), size=size, levels=255)
    assert float(bits) == pytest.approx(4.12, abs=0.001)
    assert uniform_bits(255) == pytest.approx(7.994, abs=0.0005)
    assert uniform_bits(16) == 4.0


@pytest.mark.parametrize(("noise", "levels"), [(0.03, 255), (0.03, 16), (0.5, 1)])
def test_noise_bits_are_the_entropy_of_the_noise_in_levels(noise: float, levels: int) -> None:
    entropy = torch.distributions.Normal(0.0, noise * levels / 2).entropy() / math.log(2)
    assert noise_bits(noise, levels) == pytest.approx(float(entropy), abs=1e-5)


def test_dequantised_images_fill_the_cells_of_their_levels() -> None:
    levels = 4
    pixels = torch.randint(
        0, levels + 1, (400, 1, 5, 5), generator=torch.Generator().manual_seed(0)
    )
    x = dequantise(pixels / (levels / 2) - 1, levels, torch.Generator().manual_seed(1))
    # In levels, the noise is uniform on half a level to either side.
    noise = (x + 1) * levels / 2 - pixels
    assert float(noise.abs().max()) <= 0.5 + 1e-6
    assert float(noise.mean()) == pytest.approx(0, abs=0.01)
    assert float(noise.var()) == pytest.approx(1 / 12, rel=0.05)


@pytest.mark.parametrize("levels", [0, -3])
def test_levels_that_cannot_be_are_refused(levels: int) -> None:
    with pytest.raises(ConfigError, match=f"levels is {levels}"):
        bits_per_dim(torch.zeros(1), size=4, levels=levels)
    with pytest.raises(ConfigError, match=f"levels is {levels}"):
        dequantise(torch.zeros(1, 2), levels, torch.Generator())


def test_sizes_and_noise_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="size is 0"):
        bits_per_dim(torch.zeros(1), size=0, levels=255)
    with pytest.raises(ConfigError, match=r"noise is 0\.0"):
        noise_bits(0.0, 255)


def cells(count: int) -> tuple[Tensor, float]:
    """Midpoints of count² cells of a box around all that the flow reaches, and a cell's area."""
    line = torch.linspace(-1, 1, 60, dtype=torch.float64)
    reached = flow(waves, torch.cartesian_prod(line, line), steps=STEPS, step_size=STEP_SIZE)
    low, high = reached.amin(0) - 0.05, reached.amax(0) + 0.05
    sides = (high - low) / count
    steps = torch.arange(count, dtype=torch.float64) + 0.5
    x = torch.cartesian_prod(low[0] + steps * sides[0], low[1] + steps * sides[1])
    return x, float(sides.prod())


def density_at(x: Tensor) -> Tensor:
    """p(x) of the flow of `waves`, (N,): by its inverse, which Newton's method finds."""
    z = x.clone()
    for _ in range(40):
        z.requires_grad_()
        mapped = flow(waves, z, steps=STEPS, step_size=STEP_SIZE)
        lines = [torch.autograd.grad(mapped[:, i].sum(), z, retain_graph=True)[0] for i in (0, 1)]
        moves = torch.linalg.solve(torch.stack(lines, 1), x - mapped.detach())
        # In steps of a bounded length, so that none leaves the basin of the one solution.
        z = z.detach() + moves / moves.norm(dim=1, keepdim=True).clamp(min=0.3) * 0.3
        if float(moves.abs().max()) < 1e-10:
            break
    found = log_abs_det(waves, z, steps=STEPS, step_size=STEP_SIZE)
    torch.testing.assert_close(found.x, x, rtol=0, atol=1e-8)
    assert not bool(found.flips.any())
    density: Tensor = log_density(z, found.total).exp()
    return density
