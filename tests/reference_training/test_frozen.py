"""Frozen networks inside a chain, and the arithmetic and compilation of a trainer."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard.reference_training.device import autocast_type, compile_modules, set_precision
from ebmguard.reference_training.networks import WideResNet, frozen
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.samplers import sgld
from tests.reference_training.parts import Calls

aten = torch.ops.aten


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


@pytest.mark.parametrize(
    ("make", "compiled"),
    [
        (partial(WideResNet, autocast=torch.bfloat16), True),
        (partial(EnergyNet, in_channels=1, image_size=8, nf=4, autocast=torch.bfloat16), False),
        (Normalised, False),
        (Normalised, True),
    ],
    ids=["WideResNet", "EnergyNet", "BatchNorm", "compiled BatchNorm"],
)
def test_a_chain_casts_weights_once_to_the_bits_of_autocast(make, compiled):
    torch.manual_seed(0)
    net, (x, noise) = make().eval(), start()
    twin = deepcopy(net)
    if compiled:
        torch.compiler.reset()
        net.compile(backend="aot_eager")
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


def test_frozen_gives_each_parameter_its_own_back():
    net = WideResNet(width=1)
    net.stem.weight.requires_grad_(False)
    net.stem.weight.grad = kept = torch.ones_like(net.stem.weight)
    before = [p.requires_grad for p in net.parameters()]

    def required():
        return [p.requires_grad for p in net.parameters()]

    with frozen(net):
        assert not any(required())
        with frozen(net):
            pass
        assert not any(required())
    assert required() == before
    with pytest.raises(ZeroDivisionError), frozen(net):
        raise ZeroDivisionError
    assert required() == before
    assert sum(before) == len(before) - 1
    assert net.stem.weight.grad is kept


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_precision_is_that_of_the_settings_and_only_bfloat16_casts():
    assert torch.get_float32_matmul_precision() == "highest"
    cudnn: Any = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit
    try:
        set_precision("tf32")
        assert torch.get_float32_matmul_precision() == "high"
        assert cudnn.allow_tf32
        for precision in ("float32", "bfloat16"):
            set_precision(precision)
            assert torch.get_float32_matmul_precision() == "highest"
            assert not cudnn.allow_tf32
            # All kernels are tried, not the first ten.
            assert cudnn.benchmark
            assert cudnn.benchmark_limit == 0
    finally:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit = before
    assert autocast_type("bfloat16") is torch.bfloat16
    assert autocast_type("float32") is autocast_type("tf32") is None


class Double(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize(
    ("setting", "precision", "device", "compiled"),
    [
        ("auto", "bfloat16", GPU, True),
        ("auto", "tf32", GPU, False),
        ("auto", "bfloat16", CPU, False),
        ("yes", "float32", CPU, True),
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
