from __future__ import annotations

import pytest
import torch
from torch import nn

from ebmguard.reference_training.networks import WideResNet


def conv(i, o, k):
    return i * o * k * k + o


def parameters_of_wrn(depth, width, in_channels, classes):
    """Counted from the table of Zagoruyko and Komodakis (2016), without batch normalisation."""
    n = (depth - 4) // 6
    total = conv(in_channels, 16, 3)
    channels = 16
    for stage in (16 * width, 32 * width, 64 * width):
        for _ in range(n):
            total += conv(channels, stage, 3) + conv(stage, stage, 3)
            channels_change = channels != stage
            total += conv(channels, stage, 1) if channels_change else 0
            channels = stage
    return total + channels * classes + classes


@pytest.mark.parametrize(("depth", "width"), [(10, 1), (10, 2), (16, 4), (28, 10)])
def test_is_the_wide_residual_network_of_that_depth_and_width(depth, width):
    with torch.device("meta"):
        net = WideResNet(in_channels=3, classes=10, depth=depth, width=width)
        out = net(torch.empty(4, 3, 32, 32))
    assert sum(p.numel() for p in net.parameters()) == parameters_of_wrn(depth, width, 3, 10)
    # depth counts the stem, two convolutions a block and, as its authors do, three shortcuts.
    threes = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(threes) == depth - 3
    assert all(m.bias is not None for m in threes)
    assert out.shape == (4,)
    assert not any("Norm" in type(m).__name__ for m in net.modules())


def test_energy_is_the_logsumexp_of_the_logits():
    torch.manual_seed(0)
    net = WideResNet(width=1).double()
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    logits = net.classify(x)
    assert logits.shape == (5, 10)
    torch.testing.assert_close(net(x), logits.exp().sum(1).log(), rtol=0, atol=1e-12)


def test_samples_do_not_see_each_other():
    torch.manual_seed(0)
    net = WideResNet(width=1).double()
    x = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(net(x)[:2], net(x[:2]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"depth": 12}, "depth is 12"), ({"depth": 4}, "depth is 4"), ({"width": 0}, "width is 0")],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        WideResNet(**settings)
