"""The batched descent: against closed forms and another implementation's constrained optimum."""

from __future__ import annotations

from typing import Any

import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from ebmguard.reference_training.shortrun.flow.quasi_newton import Objective, Point, descend


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


def test_a_curved_valley_is_followed_to_its_end() -> None:
    found = end(rosenbrock, starts(20, 2), iterations=200)
    torch.testing.assert_close(found.z, torch.ones(20, 2, dtype=torch.float64))


def test_a_curved_valley_is_followed_to_the_side_of_the_box() -> None:
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
