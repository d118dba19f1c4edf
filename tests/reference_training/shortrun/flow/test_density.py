"""Determinants, densities and bits: against whole Jacobians, closed forms, and an integral of 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ebmguard.reference_training.shortrun.flow.density import (
    bits_per_dim,
    dequantise,
    extended_log_density,
    flow,
    hessians,
    inside_cube,
    log_abs_det,
    noise_bits,
)
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.samplers import sgld

Energy = Callable[[Tensor], Tensor]
STEEP = 40.0
"""Factor on an untrained network with which a few steps change volumes visibly."""


@pytest.mark.parametrize(("channels", "image_size"), [(1, 6), (2, 5)])
def test_it_is_that_of_the_whole_map_by_automatic_differentiation(
    channels: int, image_size: int
) -> None:
    f, z = convolutional(channels, image_size)
    found = log_abs_det(f, z, steps=6, step_size=0.8)
    signs, expected = of_whole_map(f, z, steps=6, step_size=0.8)
    worst = float(((found.total - expected) / expected).abs().max())
    print(f"relative error of log|det|: {worst:.1e}, of {expected.tolist()}")
    assert worst < 1e-6
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


def test_determinants_that_are_none() -> None:
    z = torch.randn(2, 3, dtype=torch.float64)
    found = log_abs_det(lambda x: -x.square().sum(1) / 2, z, steps=2, step_size=1.0)
    assert found.total.tolist() == [-math.inf, -math.inf]
    assert found.flips.tolist() == [0, 0]
    z = torch.tensor([[1.0, 2.0], [math.nan, 0.0]], dtype=torch.float64)
    total = log_abs_det(lambda x: -x.pow(4).sum(1), z, steps=1, step_size=0.1).total
    assert math.isfinite(total[0])
    assert math.isnan(total[1])


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


# -- from determinants to densities and bits --


def test_the_cube_has_its_sides() -> None:
    z = torch.tensor([[1.0, -1.0], [1.0000001, 0.0], [0.3, -7.0]])
    assert inside_cube(z).tolist() == [True, False, False]


@settings(deadline=None)
@given(
    size=st.integers(1, 4000),
    levels=st.integers(1, 255),
    stretch=st.floats(1e-3, 1e3),
)
def test_bits_are_those_of_a_box_in_levels(size: int, levels: int, stretch: float) -> None:
    # A flow x = stretch * z fills a box of 2 * stretch a side, levels * stretch in levels.
    log_det = torch.tensor([size * math.log(stretch)], dtype=torch.float64)
    log_p = extended_log_density(log_det, size=size)
    bits = bits_per_dim(log_p, size=size, levels=levels)
    torch.testing.assert_close(bits.item(), math.log2(levels * stretch), rtol=1e-9, atol=1e-9)


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


# -- the map itself --


def test_the_map_is_the_sampler_without_noise_and_its_derivative_known() -> None:
    network = _network()
    z = torch.rand(4, 1, 8, 8) * 2 - 1
    expected = sgld(network, z, steps=5, step_size=0.7, noise_std=0.0)
    torch.testing.assert_close(flow(network, z, steps=5, step_size=0.7), expected)
    z = (torch.rand(2, 1, 8, 8, dtype=torch.float64) * 2 - 1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: flow(network.double(), z, steps=3, step_size=5.0), (z,), fast_mode=True
    )


def test_graphs_are_kept_only_where_they_are_asked_for() -> None:
    network = _network()
    z = torch.rand(2, 1, 8, 8)
    # Parameters that require gradients do not make a graph of a sampler's run.
    assert not flow(network, z, steps=2, step_size=1.0).requires_grad
    z.requires_grad_()
    assert flow(network, z, steps=2, step_size=1.0).requires_grad
    with torch.no_grad():
        assert not flow(network, z, steps=2, step_size=1.0).requires_grad
    found = log_abs_det(network, z, steps=2, step_size=1.0)
    assert not found.x.requires_grad
    assert not found.total.requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())


def _network() -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = EnergyNet(in_channels=1, image_size=8, nf=4, activation="gelu")
    return network
