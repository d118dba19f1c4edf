"""A file of JSON lines that another process is still writing, read as it grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..sinks.jsonl import parse_line

__all__ = ["Tail"]

_CHUNK = 1 << 20
# As much of what was read last as tells whether it is still there.
_REMEMBERED = 4096


class Tail:
    """The records of a file that grows, each of them once.

    At any moment the records read so far are those that :func:`~ebmguard.sinks.read_jsonl` would
    return: a last line that is only half written is left for later. The file need not exist yet.
    A trainer that resumes cuts its files back to its last checkpoint: where what was read is no
    longer there, reading begins anew.

    Args:
        path: a ``.jsonl`` file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._before = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """The next records, of at most about a megabyte; none where nothing is new.

        Returns:
            Whether the file began anew, so that all records of earlier calls are void; and the
            records.

        Raises:
            ConfigError: a line that is complete is not a JSON object.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return self._forget(), []
        with file:
            file.seek(self._offset - len(self._before))
            anew = file.read(len(self._before)) != self._before and self._forget()
            file.seek(self._offset)
            data = file.read(_CHUNK)
            # One line may be longer than a chunk.
            while data and b"\n" not in data and (more := file.read(_CHUNK)):
                data += more
        whole, newline, rest = data.rpartition(b"\n")
        lines = whole.split(b"\n")
        taken = len(whole) + len(newline)
        # The start of an object is never itself an object, so a last line that parses is complete.
        if rest and parse_line(rest) is not None:
            lines.append(rest)
            taken += len(rest)
        records = [self._parse(line) for line in lines if line]
        self._offset += taken
        self._before = (self._before + data[:taken])[-_REMEMBERED:]
        return anew, records

    def _forget(self) -> bool:
        had = self._offset > 0
        self._offset, self._before = 0, b""
        return had

    def _parse(self, line: bytes) -> dict[str, Any]:
        record = parse_line(line)
        if record is None:
            raise ConfigError(
                f"A line of {self.path} is not a JSON object: {line[:80]!r}. Expected a file "
                "written by JsonlSink. Remove the line or restore the file."
            )
        return record
