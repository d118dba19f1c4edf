"""The arithmetic of a trainer is that of its settings; when and for what shapes it is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ebmguard.reference_training.device import autocast_type, compile_modules, set_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_precision_is_that_of_the_settings():
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


def test_only_bfloat16_casts():
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


def test_each_shape_is_compiled_for_itself(monkeypatch):
    """Of a dynamic batch, the second size would be the last that is compiled."""
    shapes = []

    def backend(graph, inputs):
        shapes.append([x.shape[0] for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 2])
        return graph.forward

    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **told: compiled(self, backend=backend, **told)
    )
    module = Double()
    torch.compiler.reset()
    compile_modules("yes", "float32", CPU, module)
    for batch in (3, 5, 7, 3):
        module(torch.zeros(batch, 2))
    torch.compiler.reset()
    assert shapes == [[3], [5], [7]]
