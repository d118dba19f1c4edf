"""The batched network is many networks of torch.nn, each drawn from its own seed."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

from ebmguard.reference_training.toy.network import EnsembleMLP


def inputs(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def alone(ensemble, member):
    """The same network of linear layers, in float64."""
    layers: list[nn.Module] = []
    for i, weight in enumerate(ensemble.weights):
        fan_in, fan_out = weight.shape[1:]
        layer = nn.Linear(fan_in, fan_out, dtype=torch.float64)
        layer.weight.data = weight[member].detach().double().T
        layer.bias.data = (
            ensemble.biases[i][member, 0].detach().double()
            if i < len(ensemble.biases)
            else torch.zeros(1, dtype=torch.float64)
        )
        layers += [layer, nn.LeakyReLU(0.05)]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("dim", [1, 2])
def test_members_are_networks_of_linear_layers(dim):
    ensemble = EnsembleMLP([3, 1, 4], dim).double()
    assert ensemble.members == 3
    x = inputs(3, 7, dim).requires_grad_()
    f = ensemble(x)
    assert f.shape == (3, 7)
    f.square().sum().backward()
    assert x.grad is not None
    for member in range(3):
        network = alone(ensemble, member)
        own = x[member].detach().requires_grad_()
        expected = network(own).squeeze(-1)
        torch.testing.assert_close(f[member], expected, rtol=1e-12, atol=1e-14)
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad[member], own.grad, rtol=1e-10, atol=1e-14)
        for i, weight in enumerate(ensemble.weights):
            linear = network[2 * i]
            assert isinstance(linear, nn.Linear)
            assert weight.grad is not None
            assert linear.weight.grad is not None
            torch.testing.assert_close(
                weight.grad[member], linear.weight.grad.T, rtol=1e-10, atol=1e-14
            )


def test_the_published_sizes():
    """10,593 parameters (Nijkamp et al. 2020), less the last bias."""
    ensemble = EnsembleMLP([0])
    assert sum(p.numel() for p in ensemble.parameters()) == 10_593 - 1
    sizes = [2, *(weight.shape[-1] for weight in ensemble.weights)]
    assert sizes == [2, 32, 64, 64, 64, 1]


def test_a_member_starts_as_its_seed_says_whoever_is_beside_it():
    many, one = EnsembleMLP([5, 6, 5]), EnsembleMLP([6])
    for together, single in zip(many.parameters(), one.parameters(), strict=True):
        assert torch.equal(together[0], together[2])
        assert not torch.equal(together[0], together[1])
        assert torch.equal(together[1:2], single)


def test_starts_out_as_the_layers_of_torch_do():
    """The two-sample Kolmogorov-Smirnov test against nn.Linear, and its bounds."""
    ensemble = EnsembleMLP(range(20))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for i, weight in enumerate(ensemble.weights):
            layers = [nn.Linear(*weight.shape[1:]) for _ in range(20)]
            pairs = [(weight, torch.cat([layer.weight.detach().flatten() for layer in layers]))]
            if i < len(ensemble.biases):
                drawn = torch.cat([layer.bias.detach() for layer in layers])
                pairs.append((ensemble.biases[i], drawn))
            for mine, theirs in pairs:
                values = mine.detach().flatten().numpy()
                assert abs(values).max() <= 1 / math.sqrt(weight.shape[1])
                assert stats.ks_2samp(values, theirs.numpy()).pvalue > 1e-3
