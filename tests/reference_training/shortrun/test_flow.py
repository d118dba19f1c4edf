"""The K-step map, its determinants, densities and inverse: against Jacobians and closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear
from torch import Tensor

from ebmguard.reference_training.shortrun.flow.density import (
    bits_per_dim,
    dequantise,
    extended_log_density,
    flow,
    hessians,
    log_abs_det,
)
from ebmguard.reference_training.shortrun.flow.invert import (
    Objective,
    Point,
    descend,
    invert,
    residual_and_gradient,
)
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.samplers import sgld
from tests.reference_training.parts import energy_net


def wide(factor: float = 3.0, **settings: Any) -> EnergyNet:
    net = energy_net(factor, **{"activation": "gelu", **settings})
    return net.double().requires_grad_(False)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


# -- determinants ------------------------------------------------------------------------------


def test_it_is_that_of_the_whole_map_by_automatic_differentiation():
    channels, size = 2, 5
    # With steep energies a few steps change volumes visibly.
    f, z = wide(60, in_channels=channels, image_size=size), uniform(3, channels, size, size)
    entries = channels * size**2

    def mapped(row: Tensor) -> Tensor:
        x: Tensor = flow(f, row[None], steps=6, step_size=0.8)[0]
        return x

    jacobians = [torch.autograd.functional.jacobian(mapped, row) for row in z]
    signs, expected = torch.linalg.slogdet(torch.stack(jacobians).view(-1, entries, entries))
    found = log_abs_det(f, z, steps=6, step_size=0.8)
    torch.testing.assert_close(found.total, expected, rtol=1e-6, atol=0)
    # What is nearly 0 would be met by anything: the map must do something to volumes.
    assert float(expected.abs().min()) > 1
    assert torch.equal(found.signs.prod(0), signs)
    torch.testing.assert_close(found.x, flow(f, z, steps=6, step_size=0.8))


def test_it_is_right_where_the_product_of_the_jacobians_has_lost_it() -> None:
    # A step stretches one direction by 3 and shrinks the other a hundredfold.
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    step = turn @ torch.diag(turn.new_tensor([3.0, 0.01])) @ turn.T

    def f(x: Tensor) -> Tensor:
        return 0.5 * ((x @ (step - torch.eye(2, dtype=x.dtype))) * x).sum(1)

    expected = 15 * math.log(0.03)
    product = torch.linalg.slogdet(torch.linalg.matrix_power(step, 15)).logabsdet
    assert abs(float(product) - expected) > 1
    found = log_abs_det(f, torch.zeros(1, 2, dtype=torch.float64), steps=15, step_size=1.0)
    assert found.total.item() == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=12)
@given(chunk=st.integers(1, 40))
@example(chunk=16)  # as many columns at a time as rows: nothing but the numbers tells them apart
def test_hessians_are_plain_second_derivatives_in_chunks_of_any_size(chunk: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(5, 7, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x @ weight.T).pow(3).sum(1)

    x = torch.randn(4, 7, dtype=torch.float64)
    expected = torch.stack(
        [torch.autograd.functional.hessian(lambda row: f(row[None])[0], row) for row in x]
    )
    torch.testing.assert_close(hessians(f, x, chunk=chunk), expected)


# -- from determinants to densities and bits --


def test_bits_are_those_of_a_box_in_levels() -> None:
    # A flow x = 3 z fills a box of 6 a side, 3 * levels in levels.
    log_p = extended_log_density(torch.tensor([40 * math.log(3)], dtype=torch.float64), size=40)
    assert bits_per_dim(log_p, size=40, levels=16).item() == pytest.approx(math.log2(16 * 3))


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


# -- the map itself --


def test_the_map_is_the_sampler_without_noise_and_its_derivative_known() -> None:
    f, z = wide(), uniform(4, 1, 8, 8)
    expected = sgld(f, z, steps=5, step_size=0.7, noise_std=0.0)
    torch.testing.assert_close(flow(f, z, steps=5, step_size=0.7), expected)
    assert torch.autograd.gradcheck(
        lambda z: flow(f, z, steps=3, step_size=5.0), (z[:2].requires_grad_(),), fast_mode=True
    )


# -- its inverse -------------------------------------------------------------------------------

CURVATURES = (0.5, 0.1, -0.2, 0.9)


def quadratic(x: Tensor) -> Tensor:
    """-1/2 sum c_i x_i², whose K-step map takes x_i times (1 - c_i)^K."""
    return -0.5 * x.square() @ x.new_tensor(CURVATURES)


def test_a_quadratic_is_inverted_in_closed_form_in_the_cube_to_the_nearest_side() -> None:
    x = uniform(5, 4, seed=1)
    found = invert(quadratic, x, steps=3, step_size=1.0, z0=uniform(5, 4))
    # The factors are 0.125, 0.729, 1.728 and 0.001.
    factors = torch.tensor([(1 - c) ** 3 for c in CURVATURES], dtype=torch.float64)
    torch.testing.assert_close(found.z, x / factors, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.x, x)
    found = invert(quadratic, x, steps=3, step_size=1.0, z0=uniform(5, 4), inside=True)
    nearest = (x / factors).clamp(-1, 1)
    assert 0 < int((nearest.abs() == 1).sum()) < nearest.numel()
    torch.testing.assert_close(found.z, nearest, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.error, (x - nearest * factors).square().mean(1))


def test_the_start_of_a_networks_run_is_found_again() -> None:
    f, z = wide(6), uniform(4, 1, 8, 8, seed=2)
    x = flow(f, z, steps=5, step_size=1.0)
    assert (x - z).square().mean() > 0.01
    found = invert(f, x, steps=5, step_size=1.0, z0=uniform(4, 1, 8, 8), inside=True)
    torch.testing.assert_close(found.z, z, rtol=0, atol=1e-6)
    assert found.error.max() < 1e-12


def test_the_gradient_is_that_of_the_whole_graph() -> None:
    f, z, x = wide(), uniform(3, 1, 8, 8), uniform(3, 1, 8, 8, seed=1)
    residual, gradient = residual_and_gradient(f, z, x, steps=6, step_size=2.0)
    z.requires_grad_()
    expected = flow(f, z, steps=6, step_size=2.0) - x
    torch.testing.assert_close(residual, expected)
    (whole,) = torch.autograd.grad(expected.square().sum(), z)
    torch.testing.assert_close(gradient, whole)


# -- the descent, against closed forms and another implementation's constrained optimum --


def rosenbrock(z: Tensor) -> tuple[Tensor, Tensor]:
    """(1 - a)² + 100 (b - a²)²: a curved valley, with its least value 0 at (1, 1)."""
    a, b = z[:, 0], z[:, 1]
    value = (1 - a) ** 2 + 100 * (b - a**2) ** 2
    gradient = torch.stack((2 * (a - 1) - 400 * a * (b - a**2), 200 * (b - a**2)), dim=1)
    return value, gradient


def end(objective: Objective, z: Tensor, **settings: Any) -> Point:
    *_, last = descend(objective, z, **settings)
    return last


def test_a_curved_valley_is_followed_to_its_end_or_to_the_side_of_the_box() -> None:
    found = end(rosenbrock, uniform(20, 2), iterations=200)
    torch.testing.assert_close(found.z, torch.ones(20, 2, dtype=torch.float64))
    found = end(rosenbrock, uniform(20, 2) / 2, iterations=200, bound=0.5)
    # With a held at 0.5 the least value is (1 - a)², at b = a².
    expected = torch.tensor([[0.5, 0.25]], dtype=torch.float64).expand(20, 2)
    torch.testing.assert_close(found.z, expected)


def test_least_squares_in_a_box_are_those_of_scipy() -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn((6, 15, 12), generator=generator, dtype=torch.float64)
    y = 5 * torch.randn((6, 15), generator=generator, dtype=torch.float64)

    def objective(z: Tensor) -> tuple[Tensor, Tensor]:
        residual = (a @ z[..., None])[..., 0] - y
        return residual.square().sum(1), 2 * (residual[:, None] @ a)[:, 0]

    found = end(objective, uniform(6, 12), iterations=300, bound=1.0)
    for i in range(6):
        expected = torch.from_numpy(lsq_linear(a[i].numpy(), y[i].numpy(), (-1, 1), tol=1e-14).x)
        assert 2 < int((found.z[i].abs() == 1).sum()) < 12
        torch.testing.assert_close(found.z[i], expected, rtol=0, atol=1e-5)


def test_what_is_not_finite_is_stepped_back_from() -> None:
    def barrier(z: Tensor) -> tuple[Tensor, Tensor]:
        return (z - z.log()).sum(1), (1 - 1 / z)

    # The first step goes to -0.9 + 0.1 beyond the barrier: log is NaN there.
    z = torch.tensor([[3.0], [0.05]], dtype=torch.float64)
    found = end(barrier, z, iterations=60, curvature=0.1)
    torch.testing.assert_close(found.z, torch.ones(2, 1, dtype=torch.float64))
