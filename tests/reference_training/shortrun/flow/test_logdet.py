"""log |det dM/dz|: against the Jacobian of the whole map, closed forms, plain derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.flow.flow_map import flow
from ebmguard.reference_training.shortrun.flow.logdet import hessians, log_abs_det
from ebmguard.reference_training.shortrun.network import EnergyNet

Energy = Callable[[Tensor], Tensor]
STEEP = 40.0
"""Factor on an untrained network with which a few steps change volumes visibly."""


@pytest.mark.parametrize(("channels", "image_size"), [(1, 8), (2, 6)])
def test_it_is_that_of_the_whole_map_by_automatic_differentiation(
    channels: int, image_size: int
) -> None:
    f, z = convolutional(channels, image_size)
    found = log_abs_det(f, z, steps=6, step_size=0.8, chunk=50)
    signs, expected = of_whole_map(f, z, steps=6, step_size=0.8)
    worst = float(((found.total - expected) / expected).abs().max())
    print(f"relative error of log|det|: {worst:.1e}, of {expected.tolist()}")
    assert worst < 1e-6
    # What is nearly 0 would be met by anything: the map must do something to volumes.
    assert float(expected.abs().min()) > 1
    assert torch.equal(found.signs.prod(0), signs)
    torch.testing.assert_close(found.x, flow(f, z, steps=6, step_size=0.8))


def test_it_is_that_of_the_whole_map_where_steps_fold_space() -> None:
    # In an odd number of dimensions a steep network turns some starts inside out.
    torch.manual_seed(2)
    weight = torch.randn(6, 3, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x @ weight.T).sin().sum(1)

    z = torch.rand(40, 3, dtype=torch.float64) * 2 - 1
    found = log_abs_det(f, z, steps=4, step_size=0.5)
    signs, expected = of_whole_map(f, z, steps=4, step_size=0.5)
    torch.testing.assert_close(found.total, expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(found.signs.prod(0), signs)
    assert torch.equal((-1.0) ** found.flips, signs)
    assert 0 < int((signs < 0).sum()) < len(z)


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


def test_steps_are_counted_where_they_were() -> None:
    # Of two steps, the second's Hessian is that at the place the first one led to.
    f, z = convolutional(1, 8)
    both = log_abs_det(f, z, steps=2, step_size=0.8)
    middle = flow(f, z, steps=1, step_size=0.8)
    torch.testing.assert_close(both.log_abs[0], log_abs_det(f, z, steps=1, step_size=0.8).total)
    torch.testing.assert_close(
        both.log_abs[1], log_abs_det(f, middle, steps=1, step_size=0.8).total
    )


def test_a_singular_step_is_minus_infinity() -> None:
    z = torch.randn(2, 3, dtype=torch.float64)
    found = log_abs_det(lambda x: -x.square().sum(1) / 2, z, steps=2, step_size=1.0)
    assert found.total.tolist() == [-math.inf, -math.inf]
    assert found.flips.tolist() == [0, 0]


def test_what_is_not_finite_is_not_a_number() -> None:
    z = torch.tensor([[1.0, 2.0], [math.nan, 0.0]], dtype=torch.float64)
    total = log_abs_det(lambda x: -x.pow(4).sum(1), z, steps=1, step_size=0.1).total
    assert math.isfinite(total[0])
    assert math.isnan(total[1])


def test_a_piecewise_linear_network_has_none() -> None:
    torch.manual_seed(0)
    f = EnergyNet(in_channels=1, image_size=8, nf=4, activation="leaky_relu").double()
    z = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    assert log_abs_det(f, z, steps=2, step_size=1.0).total.tolist() == [0.0, 0.0]


def test_float32_is_near_and_its_determinants_are_float64() -> None:
    f, z = convolutional(1, 8)
    exact = log_abs_det(f, z, steps=3, step_size=0.8)
    torch.manual_seed(0)
    network = EnergyNet(in_channels=1, image_size=8, nf=4, activation="gelu")
    found = log_abs_det(lambda x: STEEP * network(x), z.float(), steps=3, step_size=0.8)
    assert found.x.dtype == torch.float32
    assert found.total.dtype == torch.float64
    torch.testing.assert_close(found.total, exact.total, rtol=1e-3, atol=1e-3)


def test_no_steps_and_no_rows_are_what_they_are() -> None:
    z = torch.rand(3, 2, dtype=torch.float64)
    still = log_abs_det(lambda x: x.sum(1), z, steps=0, step_size=1.0)
    assert torch.equal(still.x, z)
    assert still.total.tolist() == [0.0, 0.0, 0.0]
    assert log_abs_det(lambda x: x.sum(1), z[:0], steps=2, step_size=1.0).total.shape == (0,)


def test_parameters_get_no_gradient_and_results_no_graph() -> None:
    torch.manual_seed(0)
    network = EnergyNet(in_channels=1, image_size=8, nf=4, activation="gelu")
    z = torch.rand(2, 1, 8, 8, requires_grad=True)
    found = log_abs_det(network, z, steps=2, step_size=1.0)
    assert not found.x.requires_grad
    assert not found.total.requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [({"chunk": 0}, "chunk is 0"), ({"chunk": 2.5}, "chunk is 2.5"), ({"steps": -1}, "steps is")],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, object], said: str) -> None:
    asked = {"steps": 2, "step_size": 1.0, **change}
    with pytest.raises(ConfigError, match=said):
        log_abs_det(lambda x: x.sum(1), torch.zeros(3, 2), **asked)


def convolutional(channels: int, image_size: int) -> tuple[Energy, Tensor]:
    """A small convolutional GELU network in float64, and three starts."""
    torch.manual_seed(0)
    network = EnergyNet(in_channels=channels, image_size=image_size, nf=4, activation="gelu")
    double = network.double()
    shape = (3, channels, image_size, image_size)
    z = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return lambda x: STEEP * double(x), z


def of_whole_map(f: Energy, z: Tensor, *, steps: int, step_size: float) -> tuple[Tensor, Tensor]:
    """Sign and log |det| of the Jacobian of M, formed in one piece, for every start."""
    size = z.shape[1:].numel()

    def mapped(row: Tensor) -> Tensor:
        x: Tensor = flow(f, row[None], steps=steps, step_size=step_size)[0]
        return x

    jacobians = [torch.autograd.functional.jacobian(mapped, row).reshape(size, size) for row in z]
    signs, logs = torch.linalg.slogdet(torch.stack(jacobians))
    return signs, logs
