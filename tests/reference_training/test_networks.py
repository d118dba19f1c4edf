from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ebmguard.reference_training.networks import WideResNet

aten = torch.ops.aten


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


# -- the function ------------------------------------------------------------------------------


def leaky_relu(x):
    return torch.where(x > 0, x, 0.2 * x)


def published(state, x, *, early, relu=leaky_relu):
    """Pooled features and logits of JEM's network, by the tensors of a WRN-16 with width > 1.

    Pre-activation blocks, LeakyReLU 0.2 and no normalisation; the first block of a stage changes
    the channels, in the second and third stage also the resolution: in the second convolution, and
    in a 1x1 convolution of the block's own input beside them.
    """
    at = state.__getitem__
    x = F.conv2d(x, at("stem.weight"), at("stem.bias"), padding=1)
    for block in range(6):
        w1, b1, w2, b2 = (
            at(f"blocks.{block}.conv{i}.{kind}") for i in (1, 2) for kind in ("weight", "bias")
        )
        stride = 2 if block in (2, 4) else 1
        first, second = (stride, 1) if early else (1, stride)
        inner = F.conv2d(relu(x), w1, b1, stride=first, padding=1)
        inner = F.conv2d(relu(inner), w2, b2, stride=second, padding=1)
        if block % 2 == 0:
            w, b = at(f"blocks.{block}.shortcut.weight"), at(f"blocks.{block}.shortcut.bias")
            x = F.conv2d(x, w, b, stride=stride)
        x = x + inner
    pooled = relu(x).flatten(2).sum(2) / (x.shape[2] * x.shape[3])
    return pooled, pooled @ at("head.weight").T + at("head.bias")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("size", [(32, 32), (28, 28), (27, 9), (1, 5)])
def test_is_the_published_function(early, size):
    torch.manual_seed(0)
    net = WideResNet(in_channels=3, classes=7, depth=16, width=2, early_stride=early).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    features, logits = published(net.state_dict(), x, early=early)
    torch.testing.assert_close(net.features(x), features, rtol=0, atol=1e-12)
    torch.testing.assert_close(net.classify(x), logits, rtol=0, atol=1e-12)
    other, _ = published(net.state_dict(), x, early=not early)
    assert (other - features).abs().max() > 1e-4


def test_silu_takes_the_place_of_leaky_relu():
    torch.manual_seed(0)
    net = WideResNet(in_channels=3, classes=7, depth=16, width=2, activation="silu").double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    swish = lambda x: x / (1 + (-x).exp())  # noqa: E731
    features, logits = published(net.state_dict(), x, early=False, relu=swish)
    torch.testing.assert_close(net.features(x), features, rtol=0, atol=1e-12)
    torch.testing.assert_close(net.classify(x), logits, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="activation is 'relu', expected leaky_relu or silu"):
        WideResNet(activation="relu")


def test_initialisation_is_that_of_pytorch():
    torch.manual_seed(0)
    net = WideResNet(in_channels=3, width=4)
    for layer in (m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))):
        bound = layer.weight[0].numel() ** -0.5  # U(-1, 1) / sqrt(fan-in), biases too
        assert layer.bias is not None
        assert bound * 0.95 < layer.weight.abs().max() <= bound
        assert layer.bias.abs().max() <= bound


def test_cost_of_jems_network():
    """GFLOP of an image at 32x32; two for each multiplication with its addition."""
    layers = [(3, 16, 3, 32)]  # channels in and out, kernel, output resolution
    channels = 16
    for stage, before, after in ((160, 32, 32), (320, 32, 16), (640, 16, 8)):
        layers += [(channels, stage, 3, before), (stage, stage, 3, after)]
        layers += [(channels, stage, 1, after)] + 6 * [(stage, stage, 3, after)]
        channels = stage
    expected = sum(2 * i * o * k * k * r * r for i, o, k, r in layers) + 2 * 640 * 10
    with torch.device("meta"):
        net = WideResNet(in_channels=3, depth=28, width=10)
        x = torch.empty(1, 3, 32, 32, requires_grad=True)
    assert sum(p.numel() for p in net.parameters()) == 36_471_338
    with FlopCounterMode(display=False) as forward:
        f = net(x).sum()
    assert forward.get_total_flops() == expected
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(f, x)  # eagerly: of the image alone
    assert backward.get_total_flops() == expected
    assert round(expected / 1e9, 1) == 11.9


# -- energies ----------------------------------------------------------------------------------


def test_energies_are_the_logsumexp_of_the_logits_or_the_logit_of_a_class():
    torch.manual_seed(0)
    net = WideResNet(width=1).double()
    x, y = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.tensor([3, 9, 0, 3])
    logits = net.classify(x)
    assert logits.shape == (4, 10)
    torch.testing.assert_close(net(x), logits.exp().sum(1).log(), rtol=0, atol=1e-12)
    assert torch.equal(net(x, y), logits[range(4), y])
    for wrong in (y[:3], y[:, None]):
        with pytest.raises(ValueError, match=r"one class for each: \(4,\)"):
            net(x, wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 12}, "depth is 12"),
        ({"depth": 4}, "depth is 4"),
        ({"width": 0}, "width is 0"),
        ({"autocast": torch.float16}, "autocast is torch.float16"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        WideResNet(**settings)


# -- autocast ----------------------------------------------------------------------------------


class Types(TorchDispatchMode):
    """Which types each operation has worked on."""

    def __init__(self):
        super().__init__()
        self.seen: dict[Any, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        self.seen.setdefault(func, set()).update(x.dtype for x in tensors)
        return func(*args, **(kwargs or {}))


def with_bfloat16(seed=0, **settings):
    """The same network in float32, and with convolutions in bfloat16."""
    torch.manual_seed(seed)
    exact, rounded = WideResNet(**settings), WideResNet(**settings, autocast=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    return exact, rounded


def test_convolutions_in_bfloat16_and_the_rest_in_float32():
    _, net = with_bfloat16(width=1)
    x = torch.randn(3, 1, 8, 8, requires_grad=True)
    with Types() as types:
        f = net(x)
        (grad,) = torch.autograd.grad(f.sum(), x)
    assert f.dtype == net.features(x).dtype == net.classify(x).dtype == torch.float32
    assert net(x, torch.tensor([0, 1, 2])).dtype == torch.float32
    assert grad.dtype == torch.float32
    low, full = {torch.bfloat16}, {torch.float32}
    assert types.seen[aten.convolution.default] == low
    assert types.seen[aten.convolution_backward.default] == low
    for operation in (aten.mean.dim, aten.addmm.default, aten.logsumexp.default):
        assert types.seen[operation] == full
    net(x).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("depth", [10, 28])
def test_energies_in_bfloat16_are_close_and_in_order(depth):
    exact, rounded = with_bfloat16(depth=depth, width=1, in_channels=3)
    contrasts = torch.linspace(0.1, 3, 60)[:, None, None, None]
    x = torch.randn(60, 3, 12, 12) * contrasts
    with torch.no_grad():
        features, f = exact.features(x), exact(x)
        found, g = rounded.features(x), rounded(x)
    # A convolution rounds its input, its weights and its output: uniformly by up to half a unit in
    # the last place. Of 3 * depth independent relative errors the squares add up.
    unit = torch.finfo(torch.bfloat16).eps / 2
    allowed = (3 * depth) ** 0.5 * unit / 3**0.5 * features.norm(dim=1)
    error = (found - features).norm(dim=1)
    assert (error < allowed).all()
    assert (error > allowed / 50).all()  # they are rounded at all
    slope = (
        exact.classify(x).softmax(1).detach() @ exact.head.weight.detach()
    )  # of f, with respect to the features
    assert ((f - g).abs() < allowed * slope.norm(dim=1)).all()
    assert spearmanr(f, g).statistic > 0.99


def test_follows_its_parameters_inside_the_autocast_of_a_caller():
    _, net = with_bfloat16(width=1)
    x = torch.randn(3, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        net.features(x)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5)
        inside = net.features(x)
    assert torch.equal(inside, net.features(x))
