"""The device of a run: found by name, and named for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebmguard.errors import ConfigError

if TYPE_CHECKING:
    import torch


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
