"""Images that took long to make, kept beside the data they were made of."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ebmguard.errors import ConfigError
from ebmguard.recovery import load_durably, save_durably

_logger = logging.getLogger("ebmguard.data")


def cached(
    folder: Path,
    name: str,
    recipe: str,
    shape: tuple[int, int, int, int],
    make: Callable[[], NDArray[np.uint8]],
) -> NDArray[np.uint8]:
    """What `make` returns, from a file where an earlier call has written it.

    The file is believed only where its checksums hold and it says that it has that recipe, shape
    and type; else the images are made again, and it is written anew. It appears under its name
    whole or not at all, so that several processes may write it. Where it cannot be written there is
    a warning, and the images are made at every call.

    Args:
        folder: of the file; it is made where it is not there.
        name: of the images, the beginning of the file's.
        recipe: all that determines the images, in words.
        shape: (N, C, H, W) of what `make` returns.
        make: makes the images.

    Raises:
        Exception: whatever `make` raises; nothing is written then.
    """
    digest = hashlib.blake2b(recipe.encode(), digest_size=8).hexdigest()
    file = folder / f"{name}-{digest}.pt"
    if file.is_file():
        try:
            return _read(file, recipe, shape)
        except ConfigError as error:
            _logger.warning("%s; the images are made again", error)
    images = make()
    try:
        _write(file, recipe, images)
    except OSError as error:
        _logger.warning("the images are not kept, and are made anew next time: %s", error)
    return images


def _read(file: Path, recipe: str, shape: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    state = load_durably(file)
    images = state.get("images")
    if state.get("recipe") != recipe or not isinstance(images, torch.Tensor):
        raise ConfigError(f"{file} does not hold what its name says")
    if images.dtype != torch.uint8 or images.shape != shape:
        raise ConfigError(
            f"{file} holds {images.dtype} of shape {tuple(images.shape)}, expected bytes of {shape}"
        )
    found: NDArray[np.uint8] = images.numpy()
    return found


def _write(file: Path, recipe: str, images: NDArray[np.uint8]) -> None:
    file.parent.mkdir(exist_ok=True)
    # A folder of its own: other processes may be writing the same file.
    with tempfile.TemporaryDirectory(prefix="partial-", dir=file.parent) as folder:
        partial = Path(folder) / file.name
        save_durably(partial, {"recipe": recipe, "images": torch.from_numpy(images)})
        os.replace(partial, file)
