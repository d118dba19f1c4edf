"""The sink of JSON lines: strict JSON, a line per step, alert or rollback, safe against a kill."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError, folder_path, typed
from .protocol import Histograms, Record, Scalars
from .safe_files import create_file, open_without_links, removed_on_failure, safe_open

__all__ = [
    "NON_FINITE",
    "AppendFile",
    "JsonlSink",
    "from_json",
    "parse_line",
    "read_jsonl",
    "to_json",
]

# Strings of the proto3 JSON mapping, since not every parser reads the bare NaN that Python writes.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_LONGEST = 1 << 20  # bytes; lines have a few thousand


@typed
class JsonlSink:
    """Write ``metrics.jsonl``, ``alerts.jsonl`` and ``recovery.jsonl`` into a folder.

    A line of ``metrics.jsonl`` is an object with ``step`` and the row's tags (without the
    ``guard/`` prefix). A line of the others is the full record of an alert or a rollback. NaN and
    infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; :func:`read_jsonl`
    turns them into floats. It appends to files of an earlier run, after it has cut off a last line
    that a kill left incomplete.

    The folder is made if missing, and may be a link. Raises a ``ConfigError``, and changes nothing,
    if the folder cannot be written, or a file in it is a link or ends in text that is no row.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        # Alerts are flushed first: they are worth the last room on a disk.
        names = ("alerts", "recovery", "metrics")
        path, self.made = folder_path("folder", folder), list[Path]()
        with removed_on_failure(self.made, path):
            self._lines = {x: AppendFile(path / f"{x}.jsonl", _line, self.made) for x in names}
            ends = [(lines, *_end(lines.path)) for lines in self._lines.values()]
            for lines, size, rest, count in ends:
                lines.rest, self.rows = rest, count
                os.truncate(lines.path, size)

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Keep one line for ``metrics.jsonl``."""
        self._lines["metrics"].add({"step": step, **scalars})

    def write_alert(self, record: Record) -> None:
        """Keep one line for ``alerts.jsonl``."""
        self._lines["alerts"].add(to_json(record))

    def write_recovery(self, record: Record) -> None:
        """Keep one line for ``recovery.jsonl``."""
        self._lines["recovery"].add(to_json(record))

    def rewind(self, step: int, attempt: int) -> None:
        """Cut off the last rows of ``metrics.jsonl`` that are of this attempt, from ``step`` on."""
        path = self._lines["metrics"].path
        if not (end := path.stat().st_size):
            return
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            while end:
                start = lines.rfind(b"\n", 0, end - 1) + 1
                row = parse_line(lines[start:end]) or {"step": -1}
                if row["step"] < step or row.get("recovery/attempt", 0) != attempt:
                    break
                end = start
        os.truncate(path, end)

    def flush(self) -> None:
        """Append the kept lines to the files; after an ``OSError`` the next flush goes on."""
        for lines in self._lines.values():
            lines.flush()


@typed
def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a file that :class:`JsonlSink` wrote, without an incomplete last line.

    Raises a ``ConfigError`` if a line before the last is not a JSON object.
    """
    file = safe_open(Path(path))
    if file is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    with file:
        lines = file.read().split(b"\n")
    records = [parse_line(line) for line in lines]
    for number, line in enumerate(lines[:-1], 1):
        if line and records[number - 1] is None:
            raise ConfigError(
                f"Line {number} of {os.fspath(path)!r} is not a JSON object: {line[:80]!r}. "
                "Expected a file written by JsonlSink. Remove the line or restore the file."
            )
    return [record for record in records if record is not None]


def to_json(value: Any) -> Any:
    """Return plain values and containers; floats that JSON cannot hold become strings."""
    if isinstance(value, Mapping):
        # Nearly all are finite floats; a call for every one would take four times as long.
        return {
            key: item if type(item) is float and item - item == 0 else to_json(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, number in NON_FINITE.items() if str(number) == str(value))
    return value


def _line(record: Record) -> bytes:
    plain = to_json(record)
    if dumps := _orjson_dumps():
        with suppress(TypeError):  # a value that orjson refuses, or with a comma in it
            return _blank(tuple(plain)) % tuple(dumps([*plain.values()])[1:-1].split(b","))
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


@cache
def _orjson_dumps() -> Callable[[Any], bytes] | None:
    try:  # 26 µs less for a row of 55 numbers
        from orjson import dumps
    except ImportError:
        return None
    return dumps


@lru_cache(8)
def _blank(names: tuple[str, ...]) -> bytes:
    """The line of a record of these names, as of the one before it, without its values."""
    keys = [json.dumps(name).encode().replace(b"%", b"%%") for name in names]
    return b"{" + b", ".join(key + b": %b" for key in keys) + b"}\n"


def from_json(value: Any) -> Any:
    """A parsed value, with strings such as "NaN" turned into floats."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object of one line; None if the line is not a complete object."""
    try:
        record = from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _end(path: Path) -> tuple[int, bytes, int]:
    """Return the number of bytes that stay, what the last line lacks, and roughly the rows."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _LONGEST))
        tail = file.read()
    rows = size * tail.count(b"\n") // max(1, len(tail))
    _, newline, last = tail.rpartition(b"\n")
    # The start of an object is never itself an object, so a last line that parses is complete.
    if parse_line(last) is not None:
        return size, b"\n", rows
    # After a loss of power zeros may stand for what was not written.
    if (newline or start == 0) and last.rstrip(b"\0")[:2] in (b"", b"{", b'{"'):
        return size - len(last), b"", rows
    raise ConfigError(
        f"{str(path)!r} ends in a line that is no row: {last[:80]!r}. Expected a file written by "
        "JsonlSink, and nothing of another is cut off. Move it away, or name another folder."
    )


class AppendFile:
    """A list of records that :meth:`flush` appends to a file, which is made if missing.

    The file is open only while it is written, so that a forked data loader inherits no handle.
    """

    def __init__(self, path: Path, encode: Callable[[Any], bytes], made: list[Path]) -> None:
        self.path = path
        self.rest = b""  # comes first at the next flush
        self._at: int | None = None  # in the file, where it begins, while that is written
        self._encode = encode
        self._pending: list[Any] = []
        if path.is_symlink():
            raise ConfigError(
                f"{str(path)!r} is a link to {str(path.readlink())!r}, and rows are not written "
                "through links. Remove it, or name another folder; the folder itself may be a link."
            )
        os.close(create_file(path, os.O_WRONLY, made))

    def add(self, record: Any) -> None:
        """Keep one record for the next flush."""
        self._pending.append(record)

    def flush(self) -> None:
        """Append pending records; after an ``OSError`` the next flush goes on at the right byte."""
        if not self._pending and not self.rest:
            return
        # In one statement, which no signal's handler can end in its midst.
        self.rest, self._pending = self.rest + b"".join(map(self._encode, self._pending)), []
        # Unbuffered: a buffered file would not say how much of it arrived.
        with open(self.path, "ab", buffering=0, opener=open_without_links) as file:
            if self._at is not None:  # that ended in its midst: how far, only the file knows
                self.rest, self._at = self.rest[max(0, file.tell() - self._at) :], None
            while self.rest:
                self._at = file.tell()
                self.rest, self._at = self.rest[file.write(self.rest) :], None
