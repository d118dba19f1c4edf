"""The K-step map, its determinants, densities and inverse: against Jacobians and closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.flow.density import (
    flow,
    inside_cube,
    log_abs_det,
    noise_bits,
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


@pytest.mark.parametrize(("channels", "size"), [(1, 6), (2, 5)])
def test_it_is_that_of_the_whole_map_by_automatic_differentiation(channels, size):
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


@settings(deadline=None, max_examples=12)
@given(
    eigenvalues=st.lists(
        st.floats(-3, 3).filter(lambda e: abs(1 - 0.3 * e) > 0.05), min_size=1, max_size=6
    ),
    steps=st.integers(0, 20),
)
def test_a_quadratic_is_the_sum_over_its_eigenvalues(eigenvalues: list[float], steps: int) -> None:
    own = torch.tensor(eigenvalues, dtype=torch.float64)
    torch.manual_seed(len(own))
    turn, _ = torch.linalg.qr(torch.randn(len(own), len(own), dtype=torch.float64))
    curvature = turn @ own.diag() @ turn.T

    def f(x: Tensor) -> Tensor:
        value: Tensor = -0.5 * ((x @ curvature) * x).sum(1)
        return value

    z = torch.randn(2, len(own), dtype=torch.float64)
    found = log_abs_det(f, z, steps=steps, step_size=0.3)
    expected = steps * (1 - 0.3 * own).abs().log().sum()
    torch.testing.assert_close(found.total, expected.expand(2), rtol=1e-9, atol=1e-9)
    negative = int((1 - 0.3 * own < 0).sum()) % 2
    assert found.flips.tolist() == [steps * negative] * 2


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


def test_determinants_that_are_none() -> None:
    z = torch.randn(2, 3, dtype=torch.float64)
    found = log_abs_det(lambda x: -x.square().sum(1) / 2, z, steps=2, step_size=1.0)
    assert found.total.tolist() == [-math.inf, -math.inf]
    assert found.flips.tolist() == [0, 0]
    z = torch.tensor([[1.0, 2.0], [math.nan, 0.0]], dtype=torch.float64)
    total = log_abs_det(lambda x: -x.pow(4).sum(1), z, steps=1, step_size=0.1).total
    assert math.isfinite(total[0])
    assert math.isnan(total[1])


# -- from determinants to densities and bits --


def test_the_cube_has_its_sides() -> None:
    z = torch.tensor([[1.0, -1.0], [1.0000001, 0.0], [0.3, -7.0]])
    assert inside_cube(z).tolist() == [True, False, False]


@pytest.mark.parametrize(("noise", "levels"), [(0.03, 255), (0.03, 16), (0.5, 1)])
def test_noise_bits_are_the_entropy_of_the_noise_in_levels(noise: float, levels: int) -> None:
    entropy = torch.distributions.Normal(0.0, noise * levels / 2).entropy() / math.log(2)
    assert noise_bits(noise, levels) == pytest.approx(float(entropy), abs=1e-5)


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


def squashing(x: Tensor) -> Tensor:
    """log cosh x - x²/2: a step of size 1 is x -> tanh x."""
    return (x + torch.nn.functional.softplus(-2 * x) - x.square() / 2).sum(1)


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


@pytest.mark.parametrize("inside", [False, True])
def test_the_start_of_a_networks_run_is_found_again(inside: bool) -> None:
    f, z = wide(6), uniform(4, 1, 8, 8, seed=2)
    x = flow(f, z, steps=5, step_size=1.0)
    assert (x - z).square().mean() > 0.01
    found = invert(f, x, steps=5, step_size=1.0, z0=uniform(4, 1, 8, 8), inside=inside)
    torch.testing.assert_close(found.z, z, rtol=0, atol=1e-6)
    assert found.error.max() < 1e-12


@pytest.mark.parametrize("activation", ["gelu", "leaky_relu"])
def test_the_gradient_is_that_of_the_whole_graph(activation: str) -> None:
    f, z, x = wide(activation=activation), uniform(3, 1, 8, 8), uniform(3, 1, 8, 8, seed=1)
    residual, gradient = residual_and_gradient(f, z, x, steps=6, step_size=2.0)
    z.requires_grad_()
    expected = flow(f, z, steps=6, step_size=2.0) - x
    torch.testing.assert_close(residual, expected)
    (whole,) = torch.autograd.grad(expected.square().sum(), z)
    torch.testing.assert_close(gradient, whole)


def test_an_image_out_of_range_keeps_its_error_beside_one_that_is_reached() -> None:
    x = torch.tensor([[0.5, -0.2], [2.0, 0.5]], dtype=torch.float64)
    found = invert(squashing, x, steps=1, step_size=1.0, z0=uniform(2, 2))
    torch.testing.assert_close(found.z[0], x[0].atanh())
    # tanh ends at 1: of the two entries one is at least 1 away.
    assert 0.5 <= float(found.error[1]) < 0.51
    torch.testing.assert_close(found.error, (found.x - x).square().mean(1))
    held = invert(squashing, x, steps=1, step_size=1.0, z0=uniform(2, 2), inside=True)
    assert torch.equal(held.z[1, 0], torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(held.error[1].item(), (2 - math.tanh(1)) ** 2 / 2)


def test_a_map_that_is_lost_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"M\(z0\) is not finite for 2 of 2"):
        invert(quadratic, uniform(2, 4), steps=3, step_size=1e200, z0=uniform(2, 4))


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


def test_what_is_flat_and_what_is_steep_is_learned() -> None:
    # Gradient descent takes some 10,000 iterations to halve the distance along the flattest axis.
    curvatures = torch.logspace(-4, 0, 8, dtype=torch.float64)

    def objective(z: Tensor) -> tuple[Tensor, Tensor]:
        return (curvatures * z.square()).sum(1) / 2, curvatures * z

    assert end(objective, uniform(10, 8), iterations=60).value.max() < 1e-20


def test_problems_do_not_touch_each_other() -> None:
    z = uniform(5, 2)
    together = list(descend(rosenbrock, z, iterations=40))
    for i in range(5):
        alone = list(descend(rosenbrock, z[i : i + 1], iterations=40))
        for both, one in zip(together, alone, strict=False):
            torch.testing.assert_close(both.z[i], one.z[0], rtol=1e-9, atol=1e-12)


def test_what_is_not_finite_is_stepped_back_from() -> None:
    def barrier(z: Tensor) -> tuple[Tensor, Tensor]:
        return (z - z.log()).sum(1), (1 - 1 / z)

    # The first step goes to -0.9 + 0.1 beyond the barrier: log is NaN there.
    z = torch.tensor([[3.0], [0.05]], dtype=torch.float64)
    found = end(barrier, z, iterations=60, curvature=0.1)
    torch.testing.assert_close(found.z, torch.ones(2, 1, dtype=torch.float64))
