"""Files that are whole or not there: written beside their name, synced, and renamed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from ..errors import ConfigError

__all__ = ["load_durably", "save_durably"]

# What a file that is not what was written may raise when it is read.
_DAMAGE = (BadZipFile, zlib.error, UnpicklingError, EOFError, OSError, RuntimeError, ValueError)


def save_durably(file: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values to a file that has its name only when all of it is there.

    A process killed at any moment leaves the file as it was before, or the new one.
    """
    partial = file.with_suffix(".partial")
    with partial.open("wb") as stream:
        torch.save(dict(state), stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, file)
    if os.name != "posix":
        return
    descriptor = os.open(file.parent, os.O_RDONLY)  # the name itself
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_durably(file: Path, device: torch.device | None = None) -> dict[str, Any]:
    """What :func:`save_durably` wrote, on a device (None: the CPU).

    Reading executes nothing (``weights_only``).

    Raises:
        ConfigError: the file cannot be read, or is not what was written.
    """
    try:
        # PyTorch writes checksums and does not look at them again.
        with ZipFile(file) as archive:
            torn = archive.testzip()
        if torn is not None:
            raise BadZipFile(f"{torn} in it is not what was written")
        state: dict[str, Any] = torch.load(file, map_location=device or "cpu", weights_only=True)
    except _DAMAGE as error:
        raise ConfigError(f"{file}: {error}") from error
    return state
