"""Rows, alerts and rollbacks as JSON lines: strict JSON, one line per step, safe against a kill."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .files import AppendFile, prepare_folder

__all__ = ["JsonlSink", "parse_line", "read_jsonl", "to_json"]

# JSON has no such numbers. These strings are those of the proto3 JSON mapping; unlike the bare
# NaN that Python writes by default, every JSON parser can read them.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Writes ``metrics.jsonl``, ``alerts.jsonl`` and ``recovery.jsonl`` into a folder.

    A line of ``metrics.jsonl`` is an object with ``step`` and the row's tags (without the
    ``guard/`` prefix: nothing else is in this file); a line of ``alerts.jsonl`` is an alert's full
    record, and one of ``recovery.jsonl`` that of a rollback. NaN and infinities are the strings
    ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; :func:`read_jsonl` turns them back. The raw
    values behind histograms are not written.

    Lines are kept in memory until :meth:`flush`. In a folder that holds the files of an earlier
    run the lines are appended; a last line that a kill tore in two is cut off first.

    Args:
        folder: created if missing.

    Raises:
        ConfigError: if the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = prepare_folder(folder)
        self._metrics = _open_lines(self.folder / "metrics.jsonl")
        self._alerts = _open_lines(self.folder / "alerts.jsonl")
        self._recoveries = _open_lines(self.folder / "recovery.jsonl")

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Keep one line for ``metrics.jsonl``."""
        self._metrics.add(partial(_line, {"step": step, **scalars}))

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """Keep one line for ``alerts.jsonl``."""
        self._alerts.add(_line(record))

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Keep one line for ``recovery.jsonl``."""
        self._recoveries.add(_line(record))

    def flush(self) -> None:
        """Append the kept lines to the files.

        Raises:
            OSError: if the disk does not take them; they are kept for the next flush.
        """
        # What little room a disk may have is the alerts'.
        self._alerts.flush()
        self._recoveries.flush()
        self._metrics.flush()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a file that :class:`JsonlSink` wrote, oldest first.

    The strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` become floats again. A last line
    that is not complete, because the process was killed while writing it, is left out.

    Args:
        path: a ``.jsonl`` file.

    Raises:
        ConfigError: if a line before the last is not a JSON object.
        FileNotFoundError: if there is no such file.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        record = parse_line(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise ConfigError(
                f"Line {number} of {os.fspath(path)!r} is not a JSON object: {line[:80]!r}. "
                "Expected a file written by JsonlSink, whose lines are all complete but perhaps "
                "the last. Remove the line or restore the file."
            )
    return records


def to_json(value: Any) -> Any:
    """The value with every float that JSON cannot hold as one of the three strings.

    Args:
        value: numbers, strings, None, and mappings, lists and tuples of them.
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def _line(record: Mapping[str, Any]) -> bytes:
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
    """The object of one line, or None if the line is no complete object.

    The strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` become floats.

    Args:
        line: one line of a file that :class:`JsonlSink` wrote, with or without its end.
    """
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    return {key: _from_json(value) for key, value in record.items()}


def _open_lines(path: Path) -> AppendFile:
    lines = AppendFile(path)
    content = path.read_bytes()
    kept, newline, last = content.rpartition(b"\n")
    if not last:
        return lines
    # The start of an object is never itself an object, so a last line that parses is complete.
    if parse_line(last) is not None:
        lines.add(b"\n")
    else:
        os.truncate(path, len(kept) + len(newline))
    return lines
