"""The writer of a guard: its sinks, with retries for those that fail, and a lock on its folder.

It does not use filelock: older versions, which torch accepts, empty the file that names the holder.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import MISFITS, ConfigError, folder_path, typed
from .call_queue import CallQueue, queued
from .protocol import Histograms, Record, Scalars, Sink
from .safe_files import create_file, removed_on_failure
from .thinning import Thinning

if TYPE_CHECKING:
    from .jsonl import JsonlSink

__all__ = ["LOCK", "PatientSink", "Writer", "as_sink", "is_gone", "lock_folder"]

LOCK = ".lock"
"""A file that stays in the folder: a folder is in use while a process holds it."""

_log = logging.getLogger("ebmguard")
# Rows kept for a sink that fails: some 50 MB. At a row a step, hours to make room on a disk.
_KEPT = 10_000
_METHODS = ("write_row", "write_alert", "write_recovery", "flush")
_HELD: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()
# The one writer of a folder, by the argument that names it: rows do not show whose they are.
_OWNERS: weakref.WeakValueDictionary[tuple[str, Path], Writer] = weakref.WeakValueDictionary()


class PatientSink:
    """Pass everything on to another sink; keep it while that sink raises ``OSError``.

    A full disk must not end a training run. The first failure is logged as an error. From then on
    all is kept here in order and tried again at every flush; beyond 10,000 the oldest rows are
    dropped and counted. Errors of any other type are bugs and are raised.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.error: OSError | None = None  # set while the sink fails
        self._kept: deque[tuple[str, tuple[Any, ...]]] = deque()  # methods and their arguments
        self._dropped = 0
        self._unflushed = 0  # taken by the sink since its last flush

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Pass the row on, or keep it."""
        self.write_rows([(step, scalars, histograms)])

    def write_rows(self, rows: Iterable[tuple[int, Scalars, Histograms]]) -> None:
        """Pass the rows on, or keep them."""
        self._pass_on(*(("write_row", (step, dict(x), dict(y))) for step, x, y in rows))

    def write_alert(self, record: Record) -> None:
        """Pass the alert on, or keep it."""
        self._pass_on(("write_alert", (record,)))

    def write_recovery(self, record: Record) -> None:
        """Pass the rollback on, or keep it."""
        self._pass_on(("write_recovery", (record,)))

    def write_verdict(self, step: int, verdict: str) -> None:
        """Pass the verdict on to a sink that takes it, or keep it."""
        if hasattr(self.sink, "write_verdict"):
            self._pass_on(("write_verdict", (step, verdict)))

    def flush(self) -> None:
        """Flush the sink, and pass on the kept rows."""
        self._drain(flushing=True)
        if self.error is not None and not (self._unflushed or self._kept):
            what = f"all but the {self._dropped} oldest rows" if self._dropped else "everything"
            _log.warning(f"{type(self.sink).__name__} takes its rows again: {what} was written.")
            self.error, self._dropped = None, 0

    def close(self) -> None:
        """Flush, and log what is lost."""
        self.flush()
        if self.error is not None:
            count = self._unflushed + len(self._kept) + self._dropped
            alerts = sum(method != "write_row" for method, _ in self._kept)
            _log.error(
                f"{type(self.sink).__name__} has not taken up to {count} rows and alerts until the "
                f"end, among them {alerts} alerts and rollbacks that were kept: {self.error}. "
                "Unless it takes them later, they are lost."
            )

    def _pass_on(self, *calls: tuple[str, tuple[Any, ...]]) -> None:
        self._kept += calls
        if self.error is None:
            self._drain()
        while len(self._kept) > _KEPT:
            oldest = next((i for i, kept in enumerate(self._kept) if kept[0] == "write_row"), 0)
            del self._kept[oldest]
            self._dropped += 1

    def _drain(self, *, flushing: bool = False) -> None:
        try:
            # A sink that has all is left alone: its owner may have closed it.
            while self._kept or (flushing and self._unflushed):
                if flushing:
                    self.sink.flush()
                    self._unflushed = 0
                while self._kept:
                    method, args = self._kept[0]
                    getattr(self.sink, method)(*args)
                    self._kept.popleft()
                    self._unflushed += 1
        except OSError as error:
            if self.error is None:
                _log.error(
                    f"{type(self.sink).__name__} cannot write: {error}. Training goes on; the last "
                    f"{_KEPT} rows and alerts are kept in memory and tried again at every flush. "
                    "Make room, or restore what is missing."
                )
            self.error = error
        except MISFITS as error:
            self._kept.clear()
            self._unflushed = 0
            raise ConfigError(
                "A sink is tried again after an OSError alone, and must raise nothing else; "
                f"{type(self.sink).__name__} raised {type(error).__name__}: {error}"
            ) from error


class Writer:
    """Write to every sink, through a :class:`PatientSink`; a forked copy writes nothing.

    Args:
        sinks: where rows, alerts and rollbacks go.
        flush_every: rows between flushes: a killed run loses these. Alerts are flushed at once.
        folder: the folder of ``log_dir=``, made if missing. JSON lines and an event file in it come
            first. Only this writer may use it until it is closed. Raises a ``ConfigError`` if
            another writer does, it cannot be written, or the package tensorboard is missing.
        thins: whether a long run's rows are thinned there, see :class:`.thinning.Thinning`.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        flush_every: int,
        folder: str | os.PathLike[str] | None = None,
        thins: bool = True,
    ) -> None:
        self.turns = CallQueue()
        self._locks: dict[str, FolderLock] = {}
        self.is_released, self._thinning = False, Thinning(is_on=False)
        logs: tuple[Sink, ...] = ()
        self._lines: JsonlSink | None = None
        self._folder = None if folder is None else folder_path("log_dir", folder).resolve()
        if self._folder is not None:
            from .jsonl import JsonlSink
            from .tensorboard import TensorBoardSink, event_file_type

            event_file_type()  # where its package is missing, nothing is created
            made = self.claim()
            with ExitStack() as undo, removed_on_failure(made, self._folder):
                undo.callback(self.release)
                self._lines = lines = JsonlSink(self._folder)
                made += lines.made
                logs = lines, TensorBoardSink(self._folder)
                undo.pop_all()
            self._thinning = Thinning(lines.rows, is_on=thins)
        self._logs = tuple(PatientSink(sink) for sink in logs)
        self._others = tuple(PatientSink(sink) for sink in sinks)
        self.sinks = self._logs + self._others
        self._flush_every, self._since_flush = flush_every, 0
        self._process = os.getpid()

    @queued
    def write(self, step: int, row: Scalars, samples: Histograms) -> None:
        """Write the row of a step, with the raw values of its histograms."""
        self._log(self._thinning.take(step, row, samples))
        if self._others:
            self._to(self._others, "write_rows", [(step, row, samples)])
        self._since_flush += 1
        if self._since_flush >= self._flush_every or self.is_released:
            self._flush()

    @queued
    def write_alerts(self, records: Sequence[Record]) -> None:
        """Write alerts, as ``Alert.record()`` has them, and flush."""
        if records:
            self._log(self._thinning.alert())
            for record in records:
                self._to(self.sinks, "write_alert", record)
            self._flush()

    @queued
    def write_recovery(self, record: Record) -> None:
        """Write a rollback, as ``Rollback.record()`` has it, and flush."""
        self._log(self._thinning.alert())
        self._to(self.sinks, "write_recovery", record)
        self._flush()

    @queued
    def write_verdict(self, step: int, verdict: str) -> None:
        """Write the verdict on the run up to a step, if it has changed."""
        self._to(self.sinks, "write_verdict", step, verdict)

    @queued
    def flush(self, *, whole: bool = False) -> None:
        """Write the folder's waiting rows, only due ones or all; flush every sink."""
        self._log(self._thinning.rest(due=not whole))
        self._flush()

    @property
    def is_whole(self) -> bool:
        """Tell whether the folder has taken all rows that were flushed."""
        return all(log.error is None for log in self._logs)

    def rewind(self, step: int, attempt: int) -> None:
        """Cut off the folder's last rows, which a run that goes on from ``step`` writes again."""
        self.flush()
        if self._lines is not None:
            self._lines.rewind(step, attempt)

    def claim(self, name: str = "log_dir", folder: Path | None = None) -> list[Path]:
        """Lock the folder, or that of another argument, against other writers until it is released,
        else a ``ConfigError``; returns new paths."""
        self.is_released, folder = False, folder or self._folder
        if folder is None or (name in self._locks and self._locks[name].close.alive):
            return []
        if _OWNERS.get((name, folder), self) is not self:
            raise ConfigError(
                f"{name}={str(folder)!r} is in use by another guard of this process. Make "
                "the guard once, before the loop over epochs, and use it for all losses of the "
                "run. For another run close that one (g.close()), or name another folder."
            )
        is_held = folder in _HELD  # by the trainer, whose it then is
        lock = self._locks[name] = lock_folder(folder)
        _OWNERS[name, folder] = self
        return [] if is_held else [*lock.made]

    def release(self) -> None:
        """Let another writer use the folders; later rows are flushed at once."""
        self.is_released = True
        for key in [key for key, owner in _OWNERS.items() if owner is self]:
            del _OWNERS[key]
        self._locks.clear()

    @queued
    def close(self) -> None:
        """Flush every sink for the last time, and log what failing sinks have not taken."""
        self._log(self._thinning.rest())
        self._flush()
        self._to(self.sinks, "close")
        self.release()

    def _flush(self) -> None:
        self._since_flush = 0
        self._to(self.sinks, "flush")

    def _log(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self._to(self._logs, "write_rows", rows)

    def _to(self, sinks: Iterable[PatientSink], method: str, *args: Any) -> None:
        if os.getpid() == self._process:
            with ExitStack() as calls:  # so that all are made, whatever one raises
                for sink in [*sinks][::-1]:
                    calls.callback(getattr(sink, method), *args)


def as_sink(obj: Any) -> Sink:
    """An entry of ``sinks=`` if it is a :class:`Sink`; an :class:`AddScalarSink` around a logger;
    else a ``ConfigError``."""
    if isinstance(obj, type):
        name = obj.__name__
        raise ConfigError(f"sinks= holds the class {name}, not an object. Pass {name}(...).")
    missing = [name for name in _METHODS if not callable(getattr(obj, name, None))]
    if not missing:
        return cast("Sink", obj)
    if callable(getattr(obj, "add_scalar", None)):
        from .tensorboard import AddScalarSink

        return AddScalarSink(obj)
    if isinstance(obj, str | os.PathLike):
        raise ConfigError(
            f"sinks= holds the path {os.fspath(obj)!r}, but expected sinks. Pass "
            "log_dir=path, or sinks=[ebmguard.sinks.JsonlSink(path)]."
        )
    lacks = f" It lacks {', '.join(missing)}." if len(missing) < len(_METHODS) else ""
    raise ConfigError(
        f"sinks= holds an object of type {type(obj).__name__}, which is no sink.{lacks} Expected "
        f"the methods {', '.join(_METHODS)}, or a logger with add_scalar(tag, value, step)."
    )


class FolderLock:
    """A folder that no other process may lock while this object lives; see :func:`lock_folder`."""

    def __init__(self, folder: Path) -> None:
        self.made: list[Path] = []  # the file and its folders, where there were none
        descriptor = create_file(folder / LOCK, os.O_RDWR, self.made)
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
            message = (
                "%s cannot be locked (%s): nothing keeps a second process from writing into it."
            )
            _log.warning(message, folder, why)
        else:
            since = datetime.now(UTC).isoformat(" ", "seconds")
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            with suppress(OSError):  # a full disk: the lock holds, without a name
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(who).encode())


@typed
def lock_folder(folder: Path) -> FolderLock:
    """Let no other process lock this folder, which is made if missing.

    The kernel ends the lock with the object, or with the process, however that dies. Within a
    process all callers get the same lock. A forked child has none: it may outlive its parent.
    Raises a ``ConfigError`` where another process holds it, or the folder cannot be written.
    """
    key = folder.resolve()
    return _HELD.get(key) or _HELD.setdefault(key, FolderLock(folder))


def is_gone(holder: Mapping[str, Any]) -> bool:
    """Tell if the process named in a lock file is over; False for another machine's process."""
    pid, is_here = holder.get("pid"), holder.get("host") == socket.gethostname()
    try:
        if is_here and sys.platform != "win32" and type(pid) is int and 0 < pid < 2**31:
            os.kill(pid, 0)  # which only asks
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


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
