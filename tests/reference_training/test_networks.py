"""The networks against plain layers and published numbers."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional as F

from ebmguard.reference_training.networks import WideResNet, evaluation_mode
from tests.reference_training.parts import energy_net, published_layers, uniform

aten = torch.ops.aten
COLOUR = {"in_channels": 3, "image_size": 32}


# -- the function ------------------------------------------------------------------------------


ACTIVATIONS = {
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.2 * x),
    "silu": lambda x: x / (1 + (-x).exp()),
}
AXES = {"batch": (0, 2, 3), "instance": (2, 3), "layer": (1, 2, 3)}
"""Of one mean and variance."""


def published(state, x, *, early_stride=False, activation="leaky_relu", norm="none", dropout=0.0):
    """Pooled features and logits of JEM's network in training, by the tensors of a WRN-16.

    Pre-activation blocks; the first block of a stage changes the channels, in the second and third
    stage also the resolution: in the second convolution, and in a 1x1 convolution of the block's
    own input beside them.
    """
    at = state.__getitem__

    def relu(x, name):
        if norm != "none":
            weight, bias = (at(f"{name}.{kind}")[:, None, None] for kind in ("weight", "bias"))
            axes = AXES[norm]
            centred = x - x.mean(axes, keepdim=True)
            x = centred / (centred.square().mean(axes, keepdim=True) + 1e-5).sqrt() * weight + bias
        return ACTIVATIONS[activation](x)

    x = F.conv2d(x, at("stem.weight"), at("stem.bias"), padding=1)
    for block in range(6):
        w1, b1, w2, b2 = (
            at(f"blocks.{block}.conv{i}.{kind}") for i in (1, 2) for kind in ("weight", "bias")
        )
        stride = 2 if block in (2, 4) else 1
        first, second = (stride, 1) if early_stride else (1, stride)
        inner = F.conv2d(relu(x, f"blocks.{block}.norm1"), w1, b1, stride=first, padding=1)
        if dropout:
            inner = inner * torch.empty_like(inner).bernoulli_(1 - dropout) / (1 - dropout)
        inner = F.conv2d(relu(inner, f"blocks.{block}.norm2"), w2, b2, stride=second, padding=1)
        if block % 2 == 0:
            w, b = at(f"blocks.{block}.shortcut.weight"), at(f"blocks.{block}.shortcut.bias")
            x = F.conv2d(x, w, b, stride=stride)
        x = x + inner
    pooled = relu(x, "norm").flatten(2).sum(2) / (x.shape[2] * x.shape[3])
    return pooled, pooled @ at("head.weight").T + at("head.bias")


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ((32, 32), {}),
        ((27, 9), {"activation": "silu"}),
        *(((27, 9), {"norm": name}) for name in AXES),
        ((32, 32), {"dropout": 0.4}),
        ((27, 9), {"early_stride": True}),
    ],
    ids=str,
)
def test_is_the_published_function(settings, size):
    torch.manual_seed(0)
    net = WideResNet(in_channels=3, classes=7, depth=16, width=2, **settings).double()
    for parameter in net.parameters():  # norms begin as 1 and 0
        parameter.data += 0.01 * torch.randn_like(parameter)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    rng = torch.get_rng_state()
    features = net.features(x)
    torch.set_rng_state(rng)
    expected, logits = published(before, x, **settings)
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-12)
    torch.set_rng_state(rng)
    torch.testing.assert_close(net.classify(x), logits, rtol=0, atol=1e-12)
    if settings:
        assert (published(before, x)[0] - features).abs().max() > 1e-4
    if settings == {"norm": "batch"}:  # the second call has seen the statistics of the first
        stem = F.conv2d(x, before["stem.weight"], before["stem.bias"], padding=1).mean((0, 2, 3))
        torch.testing.assert_close(net.blocks[0].norm1.running_mean, 0.9 * stem + 0.09 * stem)
    with evaluation_mode(net):
        alone = torch.cat([net.features(each[None]) for each in x])
        torch.testing.assert_close(net.features(x), alone, rtol=0, atol=1e-12)
    assert net.training


# -- energies ----------------------------------------------------------------------------------


def test_energies_are_those_of_the_logits_or_an_output_beside_them():
    torch.manual_seed(0)
    net = WideResNet(width=1).double()
    x, y = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.tensor([3, 9, 0, 3])
    logits = net.classify(x)
    assert logits.shape == (4, 10)
    torch.testing.assert_close(net(x), logits.exp().sum(1).log(), rtol=0, atol=1e-12)
    assert net(x, y).tolist() == [logits[i, c].item() for i, c in enumerate(y.tolist())]
    torch.testing.assert_close(net(x)[:2], net(x[:2]), rtol=0, atol=1e-12)
    torch.manual_seed(0)
    net = WideResNet(width=1, classes=3, unconditional=True)
    x = torch.randn(4, 1, 8, 8)
    outputs = net.features(x) @ net.head.weight.T + net.head.bias
    torch.testing.assert_close(net.classify(x), outputs[:, :3])
    torch.testing.assert_close(net(x), outputs[:, 3])
    with pytest.raises(ValueError, match="unconditional: it has no f"):
        net(x, torch.tensor([0, 1, 2, 0]))


# -- autocast ----------------------------------------------------------------------------------


def with_bfloat16(seed=0, **settings):
    """The same network in float32, and with convolutions in bfloat16."""
    torch.manual_seed(seed)
    exact, rounded = WideResNet(**settings), WideResNet(**settings, autocast=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    return exact, rounded


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


@pytest.mark.parametrize(
    ("activation", "act"), [("leaky_relu", lambda: nn.LeakyReLU(0.2)), ("gelu", nn.GELU)]
)
def test_the_published_network_layer_by_layer(activation, act):
    net = energy_net(**COLOUR, activation=activation)
    plain = published_layers(4, act, channels=3, halvings=3)
    torch.manual_seed(0)
    same_seed = published_layers(4, act, channels=3, halvings=3)
    for own, other, fresh in zip(
        net.parameters(), plain.parameters(), same_seed.parameters(), strict=True
    ):
        # Initialised as PyTorch does, layer after layer.
        assert torch.equal(own, fresh)
        other.data.copy_(own.data)
    x = uniform(5, 3, 32, 32)
    assert torch.equal(net(x), plain(x))
    gradients = [torch.autograd.grad(g(x).sum(), list(g.parameters())) for g in (net, plain)]
    for one, another in zip(*gradients, strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize(
    ("size", "channels", "widths", "last"),
    [
        (8, 1, [4, 8], 4),
        (14, 1, [4, 8, 16], 3),
        (28, 1, [4, 8, 16, 32], 3),
        (32, 3, [4, 8, 16, 32], 4),
        (64, 3, [4, 8, 16, 32, 32], 4),
        (3, 1, [4], 3),
    ],
)
def test_other_sizes_are_halved_to_four_pixels_or_fewer(size, channels, widths, last):
    net = energy_net(image_size=size, in_channels=channels)
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [*widths, 1]
    assert convolutions[-1].kernel_size == (last, last)
    assert {layer.kernel_size for layer in convolutions[1:-1]} <= {(4, 4)}
    assert {layer.stride for layer in convolutions[1:-1]} <= {(2, 2)}
    x = uniform(2, channels, size, size).requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x)
    assert bool((gradient != 0).all(1).flatten(1).any(1).all())
    # The last convolution sees every pixel that is left: each moves f.
    assert bool((gradient.abs().sum((0, 1)) > 0).all())
