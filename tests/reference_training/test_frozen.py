"""Frozen networks inside a chain, and the arithmetic and compilation of a trainer."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from ebmguard import guard
from ebmguard.reference_training.device import compile_modules
from ebmguard.reference_training.networks import WideResNet, frozen
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.samplers import sgld
from tests.reference_training.parts import Calls

aten = torch.ops.aten


class Masks:
    """AOT autograd with an eager backend, keeping what its backward passes compute.

    For each compiled backward pass and each of its convolutions: whether there are gradients of the
    input, the weight and the bias.
    """

    def __init__(self):
        self.backwards: list[list[tuple[bool, ...]]] = []
        self.backend = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=self._backward
        )

    def _backward(self, graph, _):
        nodes = [n for n in graph.graph.nodes if n.target is aten.convolution_backward.default]
        self.backwards.append([tuple(n.args[-1]) for n in nodes])
        return make_boxed_func(graph.forward)


@pytest.fixture
def masks():
    torch.compiler.reset()
    yield Masks()
    torch.compiler.reset()


SETTINGS: dict[str, Any] = {"steps": 3, "step_size": 1.0, "noise_std": 0.1}


def start(n=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 8, 8, generator=generator, dtype=dtype)
    return x, torch.randn(3, n, 1, 8, 8, generator=generator, dtype=dtype)


def plain(network, x, noise, *labels):
    return sgld(lambda x: network(x, *labels), x, noise=noise, **SETTINGS)


def sampler(network, *tensors):
    with frozen(network) as f:
        return plain(f, *tensors)


@pytest.mark.parametrize("part", ["module", "outputs"])
@pytest.mark.parametrize("labels", [(), (torch.tensor([7, 2]),)], ids=["f(x)", "f(x, y)"])
def test_compiled_networks_are_tempered(masks, part, labels):
    torch.manual_seed(0)
    net, twin = WideResNet(width=1).double(), WideResNet(width=1).double()
    twin.load_state_dict(net.state_dict())
    if part == "module":
        net.compile(backend=masks.backend)
    else:
        compiled = torch.compile(net.outputs, backend=masks.backend)
        net.outputs = compiled
    inputs = (*start(dtype=torch.float64), *labels)
    found, norms = [], []
    for each in (net, twin):
        g = guard(None, sampler, beta_star=lambda step: 0.2 * (1 + step), output_scale=1.0)
        for _ in range(3):
            found.append(g.sampler(each, *inputs))
            g.loss_fn(torch.zeros(2), torch.ones(2))
            norms.append(g.last["sampler/grad_norm"])
    for step in range(3):
        torch.testing.assert_close(found[step], found[3 + step], rtol=1e-10, atol=1e-10)
        assert norms[step] == pytest.approx(norms[3 + step], rel=1e-6)
    assert (found[0] - found[1]).abs().max() > 1e-6
    assert len(masks.backwards) == 1  # a new beta compiles nothing
    assert not any(weight or bias for _, weight, bias in masks.backwards[0])
    torch.testing.assert_close(
        plain(net, *inputs), plain(twin, *inputs), rtol=1e-10, atol=1e-10
    )  # untempered afterwards


class Normalised(nn.Module):
    """With a BatchNorm, whose weights autocast leaves in float32."""

    autocast = torch.bfloat16

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.SiLU())
        self.head = nn.Conv2d(5, 1, 6)

    def forward(self, x):
        with torch.autocast("cpu", self.autocast, cache_enabled=False):
            maps = self.features(x)
        return self.head(maps.float()).flatten()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        partial(WideResNet, depth=16, autocast=torch.bfloat16),
        partial(EnergyNet, in_channels=1, image_size=8, nf=4, autocast=torch.bfloat16),
        Normalised,
    ],
    ids=["WideResNet", "EnergyNet", "BatchNorm"],
)
def test_a_chain_casts_weights_once_to_the_bits_of_autocast(make, compiled, masks):
    torch.manual_seed(0)
    net, (x, noise) = make().eval(), start()
    twin = deepcopy(net)
    if compiled:
        net.compile(backend=masks.backend)
    weights, cast = {p.shape for p in net.parameters()}, aten._to_copy.default
    for step in range(2):  # parameters of the second are others
        with Calls() as before:
            expected = plain(twin, x, noise)
        with Calls() as casts:
            found = sampler(net, x, noise)
        assert torch.equal(found, expected), step
        assert len(weights.intersection(x.shape for x, *_ in before.args[cast])) > 1
        assert not weights.intersection(x.shape for x, *_ in casts.args[cast])
        with torch.no_grad():
            for p in (*net.parameters(), *twin.parameters()):
                p.mul_(1.2)
    for name, own in twin.state_dict().items():  # statistics of batches too
        torch.testing.assert_close(net.state_dict()[name], own, rtol=0, atol=0)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Double(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize(
    ("setting", "precision", "device", "compiled"),
    [
        ("auto", "bfloat16", GPU, True),
        ("auto", "tf32", GPU, False),
        ("auto", "float32", GPU, False),
        ("auto", "bfloat16", CPU, False),
        ("yes", "float32", CPU, True),
        ("yes", "tf32", GPU, True),
        ("no", "bfloat16", GPU, False),
    ],
)
def test_bfloat16_on_a_gpu_is_compiled_unless_told(
    setting, precision, device, compiled, monkeypatch
):
    modules, found = (Double(), Double()), []
    monkeypatch.setattr(Double, "compile", lambda self, **told: found.append((self, told)))
    compile_modules(setting, precision, device, *modules)
    told = {"dynamic": False, "mode": "max-autotune-no-cudagraphs" if device is GPU else None}
    assert found == [(module, told) for module in modules if compiled]
