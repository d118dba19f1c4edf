"""What a run computes on and in: its device, its arithmetic, compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ebmguard.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

PrecisionName = Literal["float32", "tf32", "bfloat16"]
CompileName = Literal["auto", "yes", "no"]


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU where there is one, else the CPU.

    Raises:
        ConfigError: PyTorch has no such device here.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        # PyTorch raises AssertionError where it was built without the device's support.
        raise ConfigError(f"device is {name!r}, which cannot be used here: {error}") from error
    return device


def describe(device: torch.device) -> str:
    """The device in words, such as "cuda (NVIDIA H200)"."""
    import torch

    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def set_precision(name: PrecisionName) -> None:
    """The arithmetic of float32 convolutions and products on a GPU, for this process.

    They are float32 with any other name than "tf32".
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


def compile_modules(
    setting: CompileName, precision: PrecisionName, device: torch.device, *modules: nn.Module
) -> None:
    """Compile modules in place with torch.compile, where that is asked for.

    Each shape is compiled for itself: a training has two or three, and code for any shape is
    slower. Without CUDA graphs, which hold whole chains already.

    Args:
        setting: "auto" compiles on a GPU in bfloat16, where eager code is bound by its launches.
        precision: of the run.
        device: of the modules.
        modules: whose calls are compiled, when they come.
    """
    on_gpu = device.type == "cuda"
    if setting == "yes" or (setting == "auto" and on_gpu and precision == "bfloat16"):
        mode = "max-autotune-no-cudagraphs" if on_gpu else None
        for module in modules:
            module.compile(mode=mode, dynamic=False)
