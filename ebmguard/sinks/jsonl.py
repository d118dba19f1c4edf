"""Rows, alerts and rollbacks as JSON lines: strict JSON, one line per step, safe against a kill."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, typed
from .protocol import Histograms, Record, Scalars

__all__ = ["AppendFile", "JsonlSink", "parse_line", "read_jsonl", "to_json"]

# Strings of the proto3 JSON mapping, since not every parser reads the bare NaN that Python writes.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@typed
class JsonlSink:
    """Writes ``metrics.jsonl``, ``alerts.jsonl`` and ``recovery.jsonl`` into a folder.

    A line of ``metrics.jsonl`` is an object with ``step`` and the row's tags (without the
    ``guard/`` prefix); one of the others is the full record of an alert or a rollback. NaN and
    infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; :func:`read_jsonl`
    turns them back. The raw values behind histograms are not written.

    Lines are kept in memory until :meth:`flush`, and appended to files of an earlier run, of which
    a last line that a kill tore in two is cut off first.

    Args:
        folder: created if missing.

    Raises:
        ConfigError: if the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        # Alerts are flushed first: they are worth the last room on a disk.
        names = ("alerts", "recovery", "metrics")
        self._lines = {name: _open_lines(self.folder / f"{name}.jsonl") for name in names}

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Keep one line for ``metrics.jsonl``."""
        self._lines["metrics"].add(partial(_line, {"step": step, **scalars}))

    def write_alert(self, record: Record) -> None:
        """Keep one line for ``alerts.jsonl``."""
        self._lines["alerts"].add(_line(record))

    def write_recovery(self, record: Record) -> None:
        """Keep one line for ``recovery.jsonl``."""
        self._lines["recovery"].add(_line(record))

    def flush(self) -> None:
        """Append the kept lines to the files; after an ``OSError`` the next flush goes on."""
        for lines in self._lines.values():
            lines.flush()


@typed
def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a file that :class:`JsonlSink` wrote, oldest first, with their floats.

    A last line that is not complete, because the process was killed while writing it, is left out.

    Raises:
        ConfigError: if a line before the last is not a JSON object.
        FileNotFoundError: if there is no such file.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        record = parse_line(line)
        if record is not None:
            records.append(record)
        elif line and number < len(lines):
            raise ConfigError(
                f"Line {number} of {os.fspath(path)!r} is not a JSON object: {line[:80]!r}. "
                "Expected a file written by JsonlSink. Remove the line or restore the file."
            )
    return records


def to_json(value: Any) -> Any:
    """Plain values and their containers, with floats that JSON cannot hold as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def _line(record: Record) -> bytes:
    return json.dumps(to_json(record), allow_nan=False).encode() + b"\n"


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object of one line, with its floats; None if the line is no complete object."""
    try:
        record = _from_json(json.loads(line))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _open_lines(path: Path) -> AppendFile:
    lines = AppendFile(path)
    content = path.read_bytes()
    last = content[content.rfind(b"\n") + 1 :]
    # The start of an object is never itself an object, so a last line that parses is complete.
    if parse_line(last) is not None:
        lines.add(b"\n")
    elif last:
        os.truncate(path, len(content) - len(last))
    return lines


class AppendFile:
    """Records kept in memory and appended to one file by :meth:`flush`.

    The file is open only while it is written, so that a forked data loader inherits no handle.

    Args:
        path: the file; its folder is created if missing.

    Raises:
        ConfigError: at construction, if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[bytes | Callable[[], bytes]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"The log folder {str(path.parent)!r} cannot be written: "
                f"{error.strerror or error}. Expected a folder that exists or can be created. "
                "Pass another log_dir, or change the permissions of this one."
            ) from error

    def add(self, record: bytes | Callable[[], bytes]) -> None:
        """Keep one record for the next flush, or the function that makes it: cheaper in a row."""
        self._pending.append(record)

    def flush(self) -> None:
        """Append what is pending.

        Raises:
            OSError: if the disk does not take it. What was not written stays pending: a later
                flush continues at the very byte.
        """
        if not self._pending:
            return
        data = memoryview(b"".join(r if isinstance(r, bytes) else r() for r in self._pending))
        written = 0
        try:
            # Unbuffered: a buffered file would not say how much of it arrived.
            with self.path.open("ab", buffering=0) as file:
                while written < len(data):
                    written += file.write(data[written:])
        finally:
            self._pending = [bytes(data[written:])] if written < len(data) else []
