"""Reading files that may be damaged, hostile, or still being written."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ConfigError, printable
from ..sinks.jsonl import from_json, parse_line

try:  # four times as fast; of what it refuses, json has the last word
    from orjson import loads as _loads
except ImportError:
    from json import loads as _loads  # type: ignore[assignment]

__all__ = ["GrowingFile", "batches", "opened", "read_object"]

_CHUNK = 2 << 20
_LONGEST = 8 << 20
_REMEMBERED = 4096  # bytes, which tell whether what was read is still there


def opened(path: Path) -> BinaryIO | None:
    """A file to read; None where there is none. A pipe, which might wait for ever, is refused."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path.open("rb")
        reason = "it is not a file"
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:  # a name that no file has
        reason = str(error)
    raise ConfigError(f"{path} cannot be read: {reason}. Remove it, or name another folder.")


class GrowingFile:
    """The records of a file of JSON lines that may still be written, each of them once.

    A last line that is only half written is left for later. The file need not exist yet. Where what
    was read is no longer there, since a trainer that resumes cuts its files back, reading begins
    anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._before = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether earlier records are void, and the next ones, of about two megabytes.

        Raises:
            ConfigError: the file cannot be read, or a line that is complete is not a JSON object,
                or longer than eight megabytes.
        """
        file = opened(self.path)
        if file is None:
            return self._forget(), []
        with file:
            try:
                file.seek(self._offset - len(self._before))
                anew = file.read(len(self._before)) != self._before and self._forget()
                file.seek(self._offset)
                data = file.read(_CHUNK)
                if not data.endswith(b"\n"):
                    data += file.readline(_LONGEST)
            except OSError as error:
                raise ConfigError(f"{self.path} cannot be read: {error.strerror}.") from error
        whole = data.rfind(b"\n") + 1
        # The start of an object is never itself an object, so a last line that parses is complete.
        if parse_line(data[whole:]) is not None:
            whole = len(data)
        elif len(data) - whole >= _LONGEST:
            raise self._damage(data[whole:], f"longer than {_LONGEST:,} bytes")
        data = data[:whole]
        self._offset += len(data)
        self._before = (self._before + data)[-_REMEMBERED:]
        return anew, self._records([line for line in data.split(b"\n") if line])

    def _records(self, lines: list[bytes]) -> list[dict[str, Any]]:
        try:
            # Of one text, in which keys are known again, in less than half of the time.
            records: list[Any] = _loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            records = []
        if len(records) != len(lines) or not all(type(record) is dict for record in records):
            records = [parse_line(line) for line in lines]
            if None in records:
                raise self._damage(lines[records.index(None)], "not a JSON object")
            return records
        return [
            from_json(record) if b'"NaN"' in line or b'Infinity"' in line else record
            for line, record in zip(lines, records, strict=True)
        ]

    def _damage(self, line: bytes, what: str) -> ConfigError:
        return ConfigError(
            f"A line of {self.path} is {what}: {line[:80]!r}. Expected a file written by "
            "JsonlSink. Remove the line or restore the file."
        )

    def _forget(self) -> bool:
        had = self._offset > 0
        self._offset, self._before = 0, b""
        return had


def batches(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The records that a file of JSON lines holds now."""
    file = GrowingFile(path)
    return iter(lambda: file.read()[1], [])


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty where it is missing or half written."""
    file = opened(path)
    if file is None:
        return {}
    try:
        with file:
            text = file.read(_LONGEST).rstrip()
        if not text or (text.startswith(b"{") and not text.endswith(b"}")):
            return {}  # half written
        found = json.loads(text)
        if isinstance(found, dict):
            return found
        reason = f"it is a {type(found).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        reason = printable(error)
    raise ConfigError(f"{path} is not a JSON object: {reason}. Restore or remove it.")
