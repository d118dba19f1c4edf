"""The one reader of run folders: rows, alerts, rollbacks, and the trainer's own files."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..alerts import Bands, Level, Limits
from ..errors import ConfigError
from ..sinks.jsonl import parse_line
from .bins import Bin, BinnedSeries
from .charts import ACCURACY, value_of

__all__ = ["Attempt", "GrowingFile", "RecordedRun"]

_ATTEMPT = "recovery/attempt"
_CHUNK = 1 << 20
_REMEMBERED = 4096  # bytes, which tell whether what was read is still there


class GrowingFile:
    """The records of a file of JSON lines that may still be written, each of them once.

    As with :func:`~ebmguard.sinks.read_jsonl` a last line that is only half written is left for
    later. The file need not exist yet. Where what was read is no longer there, since a trainer that
    resumes cuts its files back, reading begins anew.
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
            lines = file.readlines(_CHUNK)
        # The start of an object is never itself an object, so a last line that parses is complete.
        if lines and not lines[-1].endswith(b"\n") and parse_line(lines[-1]) is None:
            lines.pop()
        records = []
        for line in lines:
            record = parse_line(line)
            if record is not None:
                records.append(record)
            elif line != b"\n":
                raise ConfigError(
                    f"A line of {self.path} is not a JSON object: {line.rstrip()[:80]!r}. Expected "
                    "a file written by JsonlSink. Remove the line or restore the file."
                )
        data = b"".join(lines)
        self._offset += len(data)
        self._before = (self._before + data)[-_REMEMBERED:]
        return anew, records

    def _forget(self) -> bool:
        had = self._offset > 0
        self._offset, self._before = 0, b""
        return had


@dataclass
class Attempt:
    """The rows from one rollback or resume to the next, or to the end.

    Attributes:
        number: how many rollbacks there were before.
        first, last: its steps.
        end: its rows count up to here: the first step that came again later, or infinity.
        rows: the rows themselves, where the run keeps them.
        series: values by tag, where it keeps those.
        bands: lower and upper edge of a moving band by tag; infinite where it is open.
    """

    number: int
    first: int
    last: int
    end: float = math.inf
    rows: list[dict[str, Any]] = field(default_factory=list)
    series: dict[str, BinnedSeries] = field(default_factory=lambda: defaultdict(BinnedSeries))
    bands: dict[str, tuple[BinnedSeries, BinnedSeries]] = field(default_factory=dict)

    def draw(self, row: dict[str, Any], tags: Iterable[str], moving: dict[str, Limits]) -> None:
        """Add a row to the series, and the limits that held for it."""
        for tag in tags:
            value = value_of(row, tag)
            if value is not None:
                self.series[tag].add(row["step"], value)
            low, high = moving.get(tag, Limits())[:2]
            if math.isfinite(low) or math.isfinite(high):
                edges = self.bands.setdefault(tag, (BinnedSeries(), BinnedSeries()))
                edges[0].add(row["step"], low)
                edges[1].add(row["step"], high)


class RecordedRun:
    """What a run folder holds so far; :meth:`update` takes in what is new.

    A folder of the guard alone (``metrics.jsonl``, ``alerts.jsonl``, ``recovery.jsonl``) is enough.
    A trainer's ``config.json``, ``accuracy.jsonl`` and ``results.json`` are used where they are. Of
    a step that came again, only the last time counts, and nothing after the earlier ones.

    Args:
        path: the folder, which need not exist yet.
        tags: diagnostics to keep for charts, in bounded memory; None keeps the rows themselves.

    Attributes:
        attempts: the rows, apart by rollback; a step may be in several of them.
        latest: the last row.
        row_count: how many there were, in all attempts.
        bands: the rules' limits, as they held for the last row; where the run has tags.
        alerts, rollbacks: records, oldest first.
        config, results: what the trainer wrote, empty where it wrote none.
    """

    def __init__(self, path: Path, tags: Iterable[str] | None = None) -> None:
        self.path = path
        self.tags = None if tags is None else tuple(tags)
        self.alerts: list[dict[str, Any]] = []
        self.rollbacks: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        # By attempt and step: evaluations come late, and out of order.
        self._accuracy: dict[int, dict[int, float]] = {}
        # Of each file what takes a record, and what forgets them all.
        files: dict[str, tuple[Callable[[dict[str, Any]], None], Callable[[], None]]] = {
            "metrics": (self._take_row, self._start),
            "alerts": (self.alerts.append, self.alerts.clear),
            "recovery": (self.rollbacks.append, self.rollbacks.clear),
            "accuracy": (self._take_accuracy, self._accuracy.clear),
        }
        self._files = [(GrowingFile(path / f"{name}.jsonl"), *do) for name, do in files.items()]
        self._start()

    def _start(self) -> None:
        self.attempts: list[Attempt] = []
        self.latest: dict[str, Any] = {}
        self.row_count = 0
        self.bands = Bands()

    @classmethod
    def read(cls, path: Path, tags: Iterable[str] | None = None) -> RecordedRun:
        """The run that a folder holds now.

        Raises:
            ConfigError: there are no rows, or a file does not hold what it should.
        """
        run = cls(path, tags)
        run.update()
        if not run.attempts:
            raise ConfigError(
                f"{path} holds no metrics.jsonl with rows. Name a trainer's or guard's run folder."
            )
        return run

    def update(self) -> bool:
        """Read what was written since the last time; say whether there was anything.

        Raises:
            ConfigError: a file does not hold what it should.
        """
        is_new = False
        for file, take, forget in self._files:
            records = None
            while records is None or records:
                anew, records = file.read()
                if anew:
                    forget()
                try:
                    for record in records:
                        take(record)
                except KeyError as error:
                    raise ConfigError(
                        f"A line of {file.path} has no {error}: {str(record)[:80]}. Expected a "
                        "file that the guard or its trainer wrote."
                    ) from error
                is_new |= anew or bool(records)
        before = self.config, self.results
        self.config = _read_object(self.path / "config.json")
        self.results = _read_object(self.path / "results.json")
        return is_new or before != (self.config, self.results)

    def _take_row(self, row: dict[str, Any]) -> None:
        step, number = row["step"], int(row.get(_ATTEMPT, 0))
        now = self.attempts[-1] if self.attempts else None
        # A trainer that is resumed without cutting its rows begins anew, too.
        if now is None or number != now.number or step <= now.last:
            for earlier in self.attempts:
                earlier.end = min(earlier.end, step)
            now = Attempt(number, step, step)
            self.attempts.append(now)
        now.last = step
        if self.tags is None:
            now.rows.append(row)
        else:
            now.draw(row, self.tags, self.bands.read(row))
        self.latest = row
        self.row_count += 1

    def _take_accuracy(self, record: dict[str, Any]) -> None:
        attempt = self._accuracy.setdefault(int(record.get("attempt", 0)), {})
        attempt[int(record["step"])] = float(record["test_accuracy"])

    @property
    def step(self) -> int | None:
        """The last row's step."""
        return self.latest.get("step")

    @property
    def is_over(self) -> bool:
        """The trainer has written how the run ended, and no row since."""
        if not self.results:
            return False
        try:
            rows = (self.path / "metrics.jsonl").stat().st_mtime
            return (self.path / "results.json").stat().st_mtime >= rows
        except FileNotFoundError:
            return True

    def setting(self, name: str) -> float | None:
        """A number from the trainer's settings."""
        nested = self.config.get("settings")
        value = {**self.config, **(nested if isinstance(nested, dict) else {})}.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def answered(self) -> int:
        """How many of the alerts, oldest first, a rollback has answered.

        They are those up to the one that the audit log names last: steps may come again.
        """
        last = self.rollbacks[-1] if self.rollbacks else {"step": -1}
        named = [
            i
            for i, alert in enumerate(self.alerts, start=1)
            if alert["step"] <= last["step"]
            # As text, in which NaN equals itself.
            and all(str(alert.get(k)) == str(last.get(k)) for k in ("rule", "tag", "value"))
        ]
        return named[-1] if named else 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that count, in the order of steps; only where ``tags`` is None."""
        return [row for own in self.attempts for row in own.rows if row["step"] < own.end]

    def series(self, tag: str) -> list[tuple[int, float]]:
        """Steps and values of a tag in :attr:`rows`, where it was recorded."""
        found = ((row["step"], row.get(tag)) for row in self.rows)
        return [(step, float(value)) for step, value in found if isinstance(value, int | float)]

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """Steps and test accuracies that count, in the order of steps."""
        return [(own.step, own.low) for own in self.surviving(ACCURACY.name)]

    def pieces(self, tag: str) -> list[tuple[list[Bin], list[Bin]]]:
        """The series of every attempt in two: what counts, and what came again later.

        A bin in which the latter begins is whole, and counts.
        """
        if tag == ACCURACY.name:
            found = [
                (
                    [Bin.of(*pair) for pair in sorted(values.items())],
                    min((a.first for a in self.attempts if a.number > number), default=math.inf),
                )
                for number, values in sorted(self._accuracy.items())
            ]
        else:
            found = [(a.series[tag].bins if tag in a.series else [], a.end) for a in self.attempts]
        return [
            ([own for own in bins if own.step < end], [own for own in bins if own.step >= end])
            for bins, end in found
        ]

    def surviving(self, tag: str) -> list[Bin]:
        """The part of a series that counts."""
        return [own for kept, _ in self.pieces(tag) for own in kept]

    def level(self, tag: str) -> Level | None:
        """What the latest value of a diagnostic is worth by itself."""
        value = value_of(self.latest, tag)
        return None if value is None else self.bands.level(tag, value)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except FileNotFoundError:
        return {}
    if not text.endswith("}"):
        return {}  # half written
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Restore or remove it.") from error
    return found if isinstance(found, dict) else {}
