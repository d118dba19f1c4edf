"""When a trainer's network is compiled, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .precision import PrecisionName

if TYPE_CHECKING:
    import torch
    from torch import nn

CompileName = Literal["auto", "yes", "no"]


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
