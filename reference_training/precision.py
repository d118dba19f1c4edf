"""The arithmetic of a trainer's convolutions and products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PrecisionName = Literal["float32", "tf32", "bfloat16"]


def set_precision(name: PrecisionName) -> None:
    """The arithmetic of float32 convolutions and products on a GPU, for this process.

    Args:
        name: "tf32" for that; with any other name they are float32.
    """
    import torch

    is_tf32 = name == "tf32"
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = is_tf32
    # Shapes are the same in every step: let cuDNN time its kernels once, and all of them.
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0


def autocast_type(name: PrecisionName) -> torch.dtype | None:
    """The type to which a network casts for its convolutions; None where it does not."""
    import torch

    return torch.bfloat16 if name == "bfloat16" else None
