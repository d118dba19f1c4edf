"""The network of short-run models against plain layers, and the published numbers of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebmguard.reference_training.shortrun.network import EnergyNet


def network(**settings):
    torch.manual_seed(0)
    return EnergyNet(**{"in_channels": 3, "image_size": 32, "nf": 4, **settings})


def images(count, channels, size):
    shape = (count, channels, size, size)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize(("nf", "parameters"), [(32, 693_569), (64, 2_763_393), (128, 11_031_809)])
def test_the_published_numbers_of_parameters(nf, parameters):
    assert sum(p.numel() for p in network(nf=nf).parameters()) == parameters


def published(nf, act):
    """The layers of the published script, for 32x32 images of 3 channels."""
    return nn.Sequential(
        nn.Conv2d(3, nf, 3, 1, 1),
        act(),
        nn.Conv2d(nf, nf * 2, 4, 2, 1),
        act(),
        nn.Conv2d(nf * 2, nf * 4, 4, 2, 1),
        act(),
        nn.Conv2d(nf * 4, nf * 8, 4, 2, 1),
        act(),
        nn.Conv2d(nf * 8, 1, 4, 1, 0),
    )


@pytest.mark.parametrize(
    ("activation", "act"), [("leaky_relu", lambda: nn.LeakyReLU(0.2)), ("gelu", nn.GELU)]
)
def test_the_published_network_layer_by_layer(activation, act):
    net, plain = network(activation=activation), published(4, act)
    torch.manual_seed(0)
    same_seed = published(4, act)
    for own, other, fresh in zip(
        net.parameters(), plain.parameters(), same_seed.parameters(), strict=True
    ):
        # Initialised as PyTorch does, layer after layer.
        assert torch.equal(own, fresh)
        other.data.copy_(own.data)
    x = images(5, 3, 32)
    assert torch.equal(net(x), plain(x).squeeze())
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
    net = network(image_size=size, in_channels=channels)
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [*widths, 1]
    assert convolutions[-1].kernel_size == (last, last)
    assert {layer.kernel_size for layer in convolutions[1:-1]} <= {(4, 4)}
    assert {layer.stride for layer in convolutions[1:-1]} <= {(2, 2)}
    x = images(2, channels, size).requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x)
    assert bool((gradient != 0).all(1).flatten(1).any(1).all())
    # The last convolution sees every pixel that is left: each moves f.
    assert bool((gradient.abs().sum((0, 1)) > 0).all())


def test_bfloat16_is_close_to_float32_and_returns_float32():
    exact, rough = network(nf=16), network(nf=16, autocast=torch.bfloat16)
    x = images(24, 3, 32).requires_grad_()
    f, g = exact(x), rough(x)
    assert f.dtype == g.dtype == torch.float32
    assert not torch.equal(f, g)
    spread = f.std()
    assert (f - g).abs().max() < 0.2 * spread
    gradients = [torch.autograd.grad(h.sum(), x)[0].flatten(1) for h in (f, g)]
    similar = torch.cosine_similarity(gradients[0], gradients[1], dim=1)
    assert similar.min() > 0.99
    # The head is computed in float32: its bias is one that bfloat16 would round to 1,000. Each of
    # its additions rounds by half an eps of the sum.
    shift, head = 1001.0, rough.head
    with torch.no_grad():
        assert head.bias is not None
        head.bias.add_(shift)
        shifted = rough(x)
    atol = head.weight[0].numel() * shift * torch.finfo(torch.float32).eps / 2
    assert atol < 1 / 2
    torch.testing.assert_close(shifted - shift, g, rtol=0, atol=atol)
