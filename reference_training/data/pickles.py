"""Pickles of byte arrays, read without running anything that they name."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebmguard.errors import ConfigError


def read_pickle(content: bytes, path: Path) -> Any:
    """What a pickle of Python 2 holds: containers, numbers, byte strings and arrays of bytes.

    Args:
        content: of the file.
        path: of the file, for the error.

    Raises:
        ConfigError: the pickle names a function or a class that arrays of bytes do not need. It
            has not been called, nor even imported.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} was not read: {error}. Delete it and fetch the published file again"
        ) from error


def _empty_array(*_: object) -> NDArray[np.uint8]:
    """The array that the pickle's next instruction fills."""
    return np.empty(0, dtype=np.uint8)


def _byte_type(code: object, *_: object) -> np.dtype[np.uint8]:
    """A data type of its own, because the pickle's next instruction sets its state."""
    if code not in (b"u1", "u1"):
        raise pickle.UnpicklingError(f"it holds an array of type {code!r}, expected bytes ('u1')")
    return np.dtype(np.uint8, copy=True)


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _byte_type,
}
"""What may be called, by the name that pickles give it; ndarray is an argument of the first."""


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return _ALLOWED[module, name]
