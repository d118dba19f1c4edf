"""Open files of a run folder, to read or to write, but no pipe, device or link out of it."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import ConfigError

__all__ = ["create_file", "open_without_links", "removed_on_failure", "safe_open"]

# A pipe that nobody writes to is opened at once, and then refused.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_BINARY"))
_NO_LINK_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def safe_open(path: Path, *, inside: Path | None = None, most: float = math.inf) -> BinaryIO | None:
    """A regular file of a run folder, to read; None if there is none.

    A link is followed if it stays in the folder. No pipe or device is read: it may never end.

    Args:
        inside: the folder, which may itself be a link; None: the folder of the file.
        most: the largest size of the file in bytes.

    Raises:
        ConfigError: it is not such a file, or cannot be read.
    """
    try:
        folder = os.path.realpath(path.parent if inside is None else inside)
        target = os.path.realpath(path, strict=True)
        if os.path.commonpath([folder, target]) != folder:
            reason = f"it leads out of {folder}"
        else:
            descriptor = os.open(target, _FLAGS)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                reason = "it is not a file"
            elif status.st_size > most:
                reason = f"it has {status.st_size:,} bytes, more than {most:,}"
            else:
                return os.fdopen(descriptor, "rb")
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a name that no file has
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"{path} cannot be read: {reason}. Remove it, or name another folder.")


@contextmanager
def removed_on_failure(made: list[Path], folder: Path) -> Iterator[None]:
    """Wrap code that opens a log folder: on failure, remove new files; no bare ``OSError``."""
    try:
        yield
    except (ConfigError, OSError) as error:
        for path in reversed(made):
            with suppress(OSError):  # it is not there, or others have written there meanwhile
                (path.rmdir if path.is_dir() else path.unlink)()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"The log folder {str(folder)!r} cannot be written: {error.strerror or error}. Pass "
            "another log_dir or Recovery(folder=), make room on the disk, or change permissions."
        ) from error


def create_file(path: Path, flags: int, made: list[Path]) -> int:
    """A descriptor of a file of a log folder, both made if missing, or a ``ConfigError``.

    Adds new paths to ``made``, folders first.
    """
    missing = [parent for parent in path.parents if not parent.exists()][::-1]
    with removed_on_failure(missing, path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = open_without_links(path, flags | os.O_CREAT | os.O_EXCL)
            missing.append(path)
        except FileExistsError:
            descriptor = open_without_links(path, flags | os.O_CREAT)
        made += missing
        return descriptor


def open_without_links(path: str | Path, flags: int) -> int:
    """Open a file, but no link: in a folder from elsewhere it may lead to any file.

    Pipes are refused too: they would wait for a reader.
    """
    descriptor = os.open(path, flags | _NO_LINK_NO_WAIT, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{os.path.basename(path)} is not a file")
    return descriptor
