"""The arithmetic of a trainer is that of its settings."""

from typing import Any

import torch

from ebmguard.reference_training.precision import autocast_type, set_precision


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
