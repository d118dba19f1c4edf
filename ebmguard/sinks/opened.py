"""The one function that opens a file of a run folder to read it."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import ConfigError

__all__ = ["opened"]

# A pipe that nobody writes to is opened at once, and then refused.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_BINARY"))


def opened(path: Path, *, inside: Path | None = None, most: float = math.inf) -> BinaryIO | None:
    """A regular file of a run folder, to read; None where there is none.

    A link is followed to where it stays in the folder. A pipe or a device, which may never end, is
    refused.

    Args:
        inside: the folder, which may itself be a link; None is the one that the file lies in.
        most: bytes that the file may have.

    Raises:
        ConfigError: what is there is no such file, or cannot be read.
    """
    try:
        folder = os.path.realpath(path.parent if inside is None else inside)
        target = os.path.realpath(path, strict=True)
        if os.path.commonpath([folder, target]) != folder:
            reason = f"it leads out of {folder}"
        else:
            descriptor = os.open(target, _FLAGS)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                reason = "it is not a file"
            elif found.st_size > most:
                reason = f"it has {found.st_size:,} bytes, more than {most:,}"
            else:
                return os.fdopen(descriptor, "rb")
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a name that no file has
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"{path} cannot be read: {reason}. Remove it, or name another folder.")
