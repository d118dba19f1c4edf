"""Files that are only ever appended to, in whole records."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError

__all__ = ["AppendFile", "prepare_folder"]


def prepare_folder(path: str | os.PathLike[str]) -> Path:
    """Create the folder with its parents, and return it.

    Raises:
        ConfigError: if it cannot be created.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


class AppendFile:
    """Records kept in memory and appended to one file by :meth:`flush`.

    The file is open only while it is written: nothing is left to close, and a forked data loader
    inherits no handle. Whoever kills the process loses what came after the last flush.

    Raises:
        ConfigError: at construction, if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[bytes | Callable[[], bytes]] = []
        try:
            path.open("ab").close()
        except OSError as error:
            raise _unwritable(path.parent, error) from error

    def add(self, record: bytes | Callable[[], bytes]) -> None:
        """Keep one record for the next flush, or the function that makes it.

        Making many in a row costs a fraction of making each between two training steps, where
        neither code nor data is in the processor's caches.
        """
        self._pending.append(record)

    def flush(self) -> None:
        """Append what is pending.

        Raises:
            OSError: if the disk does not take it. What was not written stays pending, so that a
                later flush continues at the very byte and the file never holds half a record
                followed by another.
        """
        if not self._pending:
            return
        records = (r if isinstance(r, bytes) else r() for r in self._pending)
        data = memoryview(b"".join(records))
        written = 0
        try:
            # Unbuffered: a buffered file would not say how much of it arrived.
            with self.path.open("ab", buffering=0) as file:
                while written < len(data):
                    written += file.write(data[written:])
        finally:
            self._pending = [bytes(data[written:])] if written < len(data) else []


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"The log folder {str(folder)!r} cannot be written: {error.strerror or error}. Expected a "
        "folder that exists or can be created, and in which files can be written. Pass another "
        "log_dir, or change the permissions of this one."
    )
