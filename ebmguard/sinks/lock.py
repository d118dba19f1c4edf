"""A folder that one process at a time writes into.

Not by filelock: its older versions, which torch takes too, empty the file that says who holds it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError, typed

__all__ = ["LOCK", "FolderLock", "is_gone", "lock_folder", "unwritable", "without_links"]

LOCK = ".lock"
"""A file that stays in the folder: what counts is whether a process holds it."""

_log = logging.getLogger("ebmguard")
_HELD: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


class FolderLock:
    """A folder that no other process may lock while this object lives; see :func:`lock_folder`."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = without_links(folder / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise unwritable(folder, error) from error
        self.close = weakref.finalize(self, os.close, descriptor)
        try:
            _flock(descriptor)
        except BlockingIOError:
            holder = "another process"
            with suppress(ValueError, KeyError, TypeError):  # it has not written it yet
                who = json.loads(os.read(descriptor, 1000))
                holder = f"process {who['pid']} on {who['host']}, since {who['since']}"
            self.close()
            raise ConfigError(
                f"The folder {str(folder)!r} is in use by {holder}. Two processes would mix their "
                "files: let that one end, or name another folder. Of several ranks of one run the "
                "first alone writes (process_group=)."
            ) from None
        except OSError as error:
            why = error.strerror or error
            said = "%s cannot be locked (%s): nothing keeps a second process from writing into it."
            _log.warning(said, folder, why)
        else:
            since = datetime.now(UTC).isoformat(" ", "seconds")
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            with suppress(OSError):  # a full disk: the lock holds, without a name
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(who).encode())


@typed
def lock_folder(folder: Path) -> FolderLock:
    """Let no other process lock this folder, which is made if missing.

    The kernel ends the lock with the object, or with the process, however that dies. Within the
    process whoever asks gets the same one. A forked child has none: it may outlive its parent.

    Raises:
        ConfigError: another process holds it, or the folder cannot be written.
    """
    key = folder.resolve()
    return _HELD.get(key) or _HELD.setdefault(key, FolderLock(folder))


def is_gone(holder: Mapping[str, Any]) -> bool:
    """Whether the process that the file of a lock names is over; False of another machine's."""
    pid, is_here = holder.get("pid"), holder.get("host") == socket.gethostname()
    try:
        if is_here and sys.platform != "win32" and type(pid) is int and 0 < pid < 2**31:
            os.kill(pid, 0)  # which only asks
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def without_links(path: str | Path, flags: int) -> int:
    """Open a file, but no link, which in a folder from elsewhere may lead to any file."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """What is said of a folder that cannot be written."""
    return ConfigError(
        f"The log folder {str(folder)!r} cannot be written: {error.strerror or error}. "
        "Pass another log_dir, or change the permissions of this one."
    )


def _flock(descriptor: int) -> None:
    if sys.platform == "win32":
        raise OSError("this system has no flock")
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _forget_in_child() -> None:
    for lock in list(_HELD.values()):
        lock.close()  # of the parent's handle this is a copy: its lock stays
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
