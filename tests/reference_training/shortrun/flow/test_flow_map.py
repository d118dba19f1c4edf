"""The K-step map: against closed forms, a plain loop and the sampler, and what it costs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ebmguard.reference_training.shortrun.flow.density import flow
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.samplers import sgld


def quadratic(x: Tensor) -> Tensor:
    """-1/2 (a x_0² + b x_1²), whose map contracts each axis by its own factor."""
    return -0.5 * (x.square() @ x.new_tensor([0.5, -0.25]))


@settings(deadline=None, max_examples=20)
@given(steps=st.integers(0, 12), step_size=st.floats(-1, 1))
def test_a_quadratic_is_a_power_of_each_axis(steps: int, step_size: float) -> None:
    z = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=torch.float64)
    factors = torch.tensor([1 - 0.5 * step_size, 1 + 0.25 * step_size], dtype=torch.float64)
    x = flow(quadratic, z, steps=steps, step_size=step_size)
    torch.testing.assert_close(x, z * factors**steps)


def test_it_is_the_sampler_without_noise() -> None:
    network = _network()
    z = torch.rand(4, 1, 8, 8) * 2 - 1
    expected = sgld(network, z, steps=5, step_size=0.7, noise_std=0.0)
    torch.testing.assert_close(flow(network, z, steps=5, step_size=0.7), expected)


def test_its_derivative_is_that_of_finite_differences() -> None:
    network = _network()
    z = (torch.rand(2, 1, 8, 8, dtype=torch.float64) * 2 - 1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: flow(network.double(), z, steps=3, step_size=5.0), (z,), fast_mode=True
    )


def test_a_graph_is_kept_only_where_it_is_asked_for() -> None:
    network = _network()
    z = torch.rand(2, 1, 8, 8)
    # Parameters that require gradients do not make a graph of a sampler's run.
    assert not flow(network, z, steps=2, step_size=1.0).requires_grad
    z.requires_grad_()
    assert flow(network, z, steps=2, step_size=1.0).requires_grad
    with torch.no_grad():
        assert not flow(network, z, steps=2, step_size=1.0).requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())


def _network() -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = EnergyNet(in_channels=1, image_size=8, nf=4, activation="gelu")
    return network
