"""Writes the rows, alerts and rollbacks of one guard to its sinks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .protocol import PatientSink, Sink

__all__ = ["Writer"]

# Rows of two guards in one folder could not be told apart.
_OWNERS: weakref.WeakValueDictionary[Path, Writer] = weakref.WeakValueDictionary()


class Writer:
    """Writes to every sink, and flushes them.

    A forked process has a copy of its parent's rows: the copy writes nothing.

    Args:
        sinks: where rows, alerts and rollbacks go. One that raises ``OSError`` does not end the
            run (see :class:`PatientSink`).
        flush_every: rows between flushes. An alert or a rollback is flushed at once; a killed run
            loses no more than that.
        folder: the folder of the sinks that ``log_dir=`` opened, which this writer alone may use
            until it is closed; or None.

    Raises:
        ConfigError: another writer of this process is using the folder.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        flush_every: int,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.sinks = tuple(PatientSink(sink) for sink in sinks)
        self._flush_every = flush_every
        self._since_flush = 0
        self._process = os.getpid()
        self._folder = None if folder is None else Path(folder).resolve()
        if self._folder is not None:
            check_free(self._folder)
            _OWNERS[self._folder] = self

    def write(
        self, step: int, row: Mapping[str, float], samples: Mapping[str, Sequence[float]]
    ) -> None:
        """Write the row of a step, with the raw values of its histograms."""
        for sink in self._own_sinks:
            sink.write_row(step, row, samples)
        self._since_flush += 1
        if self._since_flush >= self._flush_every:
            self.flush()

    def write_alerts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write alerts, as ``Alert.record()`` has them, so that they outlive the run."""
        for record in records:
            for sink in self._own_sinks:
                sink.write_alert(record)
        if records:
            self.flush()

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Write a rollback, as ``Rollback.record()`` has it, so that it outlives the run."""
        for sink in self._own_sinks:
            sink.write_recovery(record)
        self.flush()

    def flush(self) -> None:
        """Flush every sink."""
        self._since_flush = 0
        for sink in self._own_sinks:
            sink.flush()

    def release(self) -> None:
        """Let another writer use the folder."""
        if self._folder is not None and _OWNERS.get(self._folder) is self:
            del _OWNERS[self._folder]

    def close(self) -> None:
        """Flush every sink for the last time, and say what those that fail have not taken."""
        for sink in self._own_sinks:
            sink.close()
        self.release()

    @property
    def _own_sinks(self) -> tuple[PatientSink, ...]:
        return self.sinks if os.getpid() == self._process else ()


def check_free(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that another writer of this process is using.

    Raises:
        ConfigError: with what to do.
    """
    if Path(folder).resolve() in _OWNERS:
        raise ConfigError(
            f"log_dir={str(folder)!r} is in use by another guard of this process, and the rows of "
            "two guards would be mixed. Close that one (g.close()), use one guard for both losses, "
            "or name another folder."
        )
