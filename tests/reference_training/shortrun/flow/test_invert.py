"""The inverse of the K-step map: of maps whose inverse is known, and of images out of range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.flow.density import flow
from ebmguard.reference_training.shortrun.flow.invert import (
    Objective,
    Point,
    descend,
    invert,
    residual_and_gradient,
)
from ebmguard.reference_training.shortrun.network import EnergyNet

CURVATURES = (0.5, 0.1, -0.2, 0.9)


def quadratic(x: Tensor) -> Tensor:
    """-1/2 sum c_i x_i², whose K-step map takes x_i times (1 - c_i)^K."""
    return -0.5 * x.square() @ x.new_tensor(CURVATURES)


def squashing(x: Tensor) -> Tensor:
    """log cosh x - x²/2: a step of size 1 is x -> tanh x."""
    return (x + torch.nn.functional.softplus(-2 * x) - x.square() / 2).sum(1)


def network(activation: str = "gelu", strength: float = 3.0) -> EnergyNet:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = EnergyNet(in_channels=1, image_size=8, nf=4, activation=activation).double()
    with torch.no_grad():
        net.head.weight.mul_(strength)
    return net.requires_grad_(False)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


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
    f, z = network(strength=6), uniform(4, 1, 8, 8, seed=2)
    x = flow(f, z, steps=5, step_size=1.0)
    assert (x - z).square().mean() > 0.01
    found = invert(f, x, steps=5, step_size=1.0, z0=uniform(4, 1, 8, 8), inside=inside)
    torch.testing.assert_close(found.z, z, rtol=0, atol=1e-6)
    assert found.error.max() < 1e-12


@pytest.mark.parametrize("activation", ["gelu", "leaky_relu"])
def test_the_gradient_is_that_of_the_whole_graph(activation: str) -> None:
    f, z, x = network(activation), uniform(3, 1, 8, 8), uniform(3, 1, 8, 8, seed=1)
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


def test_the_course_and_its_stages_also_at_rest() -> None:
    f, x, z0 = network(), uniform(3, 1, 8, 8, seed=1), uniform(3, 1, 8, 8)
    found = invert(f, x, steps=4, step_size=1.0, z0=z0, iterations=12, stages=(0, 2, 12))
    assert found.course.shape == (13, 3)
    assert bool((found.course.diff(dim=0) <= 0).all())
    assert torch.equal(found.course[-1], found.error)
    assert torch.equal(found.stages[0], flow(f, z0, steps=4, step_size=1.0))
    assert torch.equal(found.stages[2], found.x)
    errors = (found.stages - x).square().flatten(2).mean(2)
    torch.testing.assert_close(errors, found.course[[0, 2, 12]])
    assert not any(t.requires_grad for t in (found.z, found.x, found.error, found.stages))
    x = uniform(2, 3, seed=1)
    found = invert(squashing, x, steps=0, step_size=1.0, z0=x, iterations=60, stages=(60,))
    assert found.course.shape == (61, 2)
    assert not found.course.any()
    assert torch.equal(found.stages[0], x)


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


def starts(count: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.rand((count, size), generator=generator, dtype=torch.float64) * 2 - 1


def test_a_curved_valley_is_followed_to_its_end_or_to_the_side_of_the_box() -> None:
    found = end(rosenbrock, starts(20, 2), iterations=200)
    torch.testing.assert_close(found.z, torch.ones(20, 2, dtype=torch.float64))
    found = end(rosenbrock, starts(20, 2) / 2, iterations=200, bound=0.5)
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

    found = end(objective, starts(6, 12), iterations=300, bound=1.0)
    for i in range(6):
        expected = torch.from_numpy(lsq_linear(a[i].numpy(), y[i].numpy(), (-1, 1), tol=1e-14).x)
        assert 2 < int((found.z[i].abs() == 1).sum()) < 12
        torch.testing.assert_close(found.z[i], expected, rtol=0, atol=1e-5)


def test_what_is_flat_and_what_is_steep_is_learned() -> None:
    # Gradient descent takes some 10,000 iterations to halve the distance along the flattest axis.
    curvatures = torch.logspace(-4, 0, 8, dtype=torch.float64)

    def objective(z: Tensor) -> tuple[Tensor, Tensor]:
        return (curvatures * z.square()).sum(1) / 2, curvatures * z

    assert end(objective, starts(10, 8), iterations=60).value.max() < 1e-20


def test_problems_do_not_touch_each_other() -> None:
    z = starts(5, 2)
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


def test_it_ends_where_all_are_at_rest() -> None:
    evaluations = 0

    def parabola(z: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal evaluations
        evaluations += 1
        return z.square().sum(1), 2 * z

    found = end(parabola, starts(3, 4), iterations=1000, curvature=2.0)
    assert torch.equal(found.z, torch.zeros(3, 4, dtype=torch.float64))
    assert evaluations < 40
