"""The one reader of run folders: rows, alerts, rollbacks, and the trainer's own files."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..alerts import Bands, Level, Limits
from ..errors import ConfigError, printable
from ..sinks import LOCK, is_gone
from ..tags import ATTEMPT, BETA_STAR, is_own, weight_tag
from . import records as of
from .bins import Bin, BinnedSeries
from .charts import ACCURACY, value_of
from .files import GrowingFile, read_object

__all__ = ["Attempt", "RecordedRun"]

# Bins of a series. From the fourth attempt on they share them: who resumes every hour fills no
# memory, and no page.
_BINS = 600
_FEWEST_BINS = 8
_MOST_ATTEMPTS = 1000
_MOST_OWN = 200
# Rows from which on the moving limits are followed in the last rows of each batch alone. They
# depend on fewer rows before: see ebmguard.alerts.GrowthRule.
_ALL_FOLLOWED = 10_000
_FOLLOWED = 100

_Reading = tuple[of.Fields | None, Callable[[list[dict[str, Any]]], None], Callable[[], None]]


@dataclass
class Attempt:
    """The rows from one rollback or resume to the next, or to the end."""

    number: int  # of rollbacks before
    first: int  # its steps
    last: int
    capacity: int = _BINS
    # Its rows count up to here: the first step that came again later.
    end: float = math.inf
    # What is kept whole: its steps, and the values by tag; NaN where a row lacks it.
    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(
        default_factory=lambda: defaultdict(lambda: array("d"))
    )
    series: dict[str, BinnedSeries] = field(default_factory=dict)  # by tag
    # Lower and upper edge of a moving band by tag; infinite where it is open.
    bands: dict[str, tuple[BinnedSeries, BinnedSeries]] = field(default_factory=dict)

    def add_limits(self, step: int, tag: str, limits: Limits) -> None:
        """Add the limits of a diagnostic that held for a row."""
        if math.isfinite(limits.low) or math.isfinite(limits.high):
            edges = BinnedSeries(self.capacity), BinnedSeries(self.capacity)
            for own, value in zip(self.bands.setdefault(tag, edges), limits, strict=False):
                own.extend([step], [value])


class RecordedRun:
    """What a run folder holds so far; :meth:`update` takes in what is new.

    A folder of the guard alone (``metrics.jsonl``, ``alerts.jsonl``, ``recovery.jsonl``) is enough.
    A trainer's ``config.json``, ``accuracy.jsonl`` and ``results.json`` are used where they are. Of
    a step that came again, only the last time counts, and nothing after the earlier ones.

    Files are read once, some megabytes at a time, and thinned as they are read.

    Args:
        path: the folder, which need not exist yet.
        tags: diagnostics to keep for charts, as the extremes of each of 600 stretches.
        whole: tags to keep with every value, for :meth:`series`.
    """

    def __init__(self, path: Path, tags: Iterable[str] = (), whole: Iterable[str] = ()) -> None:
        self.path = path
        self.name = printable(path)
        self.tags, self.whole = tuple(tags), tuple(whole)
        self.alerts: list[dict[str, Any]] = []  # oldest first, as are rollbacks
        self.rollbacks: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}  # empty where the trainer wrote none, as are results
        self.results: dict[str, Any] = {}
        # By attempt and step: evaluations come late, and out of order.
        self._accuracy: dict[int, dict[int, float]] = {}
        self._rows = path / "metrics.jsonl"
        # Of each file its fields, what takes its records, and what forgets them all. Rows are
        # checked as they are taken.
        files: dict[str, _Reading] = {
            "metrics": (None, self._take_rows, self._start),
            "alerts": (of.ALERT, self.alerts.extend, self.alerts.clear),
            "recovery": (of.ROLLBACK, self.rollbacks.extend, self.rollbacks.clear),
            "accuracy": (of.ACCURACY, self._take_accuracy, self._accuracy.clear),
        }
        self._files = [(GrowingFile(path / f"{name}.jsonl"), *do) for name, do in files.items()]
        self._start()

    def _start(self) -> None:
        self.attempts: list[Attempt] = []  # a step may be in several of them
        self.own: list[str] = []  # the trainer's own numbers, kept as tags are where there are any
        self.latest: dict[str, Any] = {}  # the last row
        self.row_count = 0
        self.bands = Bands()  # as they held for the last row, where the run has tags
        self._held: dict[str, Limits] = {}

    @classmethod
    def read(cls, path: Path, tags: Iterable[str] = (), whole: Iterable[str] = ()) -> RecordedRun:
        """The run that a folder holds now.

        Raises:
            ConfigError: there are no rows, or a file does not hold what it should.
        """
        run = cls(path, tags, whole)
        run.update()
        if not run.attempts:
            raise ConfigError(
                f"{path} holds no metrics.jsonl with rows. Name a trainer's or guard's run folder."
            )
        return run

    def update(self) -> bool:
        """Read what was written since the last time; say whether there was anything."""
        is_new = False
        for file, fields, take, forget in self._files:
            records = None
            while records is None or records:
                anew, records = file.read()
                if anew:
                    forget()
                take(of.checked(records, fields, file.path) if fields else records)
                is_new |= anew or bool(records)
        before = self.config, self.results
        self.config, self.results = (
            of.plain(read_object(path), path)
            for path in (self.path / "config.json", self.path / "results.json")
        )
        of.check(self.results, of.RESULTS, self.path / "results.json")
        return is_new or before != (self.config, self.results)

    def _take_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take a batch apart where an attempt or the use of weights begins or ends."""
        last = self.attempts[-1].last if self.attempts else -1
        kind, begin = None, 0
        for i, row in enumerate(rows):
            step, own = row.get("step", -1), (row.get(ATTEMPT, 0), row.get(BETA_STAR) == 0)
            if own != kind or not of.is_step(step):
                of.check(row, of.ROW, self._rows)
            if step <= last or own != kind:
                self._take_stretch(rows[begin:i])
                begin, kind = i, own
            last = step
        self._take_stretch(rows[begin:])

    def _take_stretch(self, rows: Sequence[dict[str, Any]]) -> None:
        if not rows:
            return
        where, steps = self._rows, [row["step"] for row in rows]
        number = int(of.number(rows[0].get(ATTEMPT, 0), ATTEMPT, where))
        now = self.attempts[-1] if self.attempts else None
        # A trainer that is resumed without cutting its rows begins anew, too.
        if now is None or number != now.number or steps[0] <= now.last:
            now = self._begin(number, steps[0])
        now.last = steps[-1]
        now.steps.extend(steps if self.whole else ())
        for tag in self.whole:
            values = (math.nan if row.get(tag) is None else row[tag] for row in rows)
            now.columns[tag].extend(of.number(value, tag, where) for value in values)
        if self.tags:
            names = sorted(set[str]().union(*rows).difference(self.tags, self.own))
            self.own += [name for name in names if not is_own(name)][: _MOST_OWN - len(self.own)]
            for tag in (*self.tags, *self.own):
                self._draw(now, rows, tag)
            for row in rows if self.row_count < _ALL_FOLLOWED else rows[-_FOLLOWED:]:
                numbers = of.numbers(row, where)
                for tag, limits in self.bands.read(numbers).items():
                    if tag in self.tags:
                        now.add_limits(row["step"], tag, self._still(numbers, tag, limits))
        self.latest = of.numbers(rows[-1], where)
        self.row_count += len(rows)

    def limits(self, tag: str) -> Limits:
        """Of a diagnostic, as they hold; in an ERROR, as they held before it."""
        return self._held.get(tag, self.bands.limits.get(tag, Limits()))

    def _still(self, row: Mapping[str, float], tag: str, limits: Limits) -> Limits:
        # From an ERROR on the rule's own limits would follow the value.
        held = self._held.pop(tag, limits)
        if held.error_low <= row.get(tag, math.nan) <= held.error_high:
            return limits
        self._held[tag] = held
        return held

    def _draw(self, now: Attempt, rows: Sequence[dict[str, Any]], tag: str) -> None:
        """Add rows to a series, all at β* = 0 or none; see :func:`.charts.value_of`."""
        own = weight_tag(tag, rows[0].get(BETA_STAR, math.nan))
        values: list[Any] = [row.get(own) for row in rows]
        if own != tag:
            values = [row.get(own, row.get(tag)) for row in rows]
        steps = [row["step"] for row in rows]
        try:
            are_numbers = isinstance(sum(values), float)
        except (TypeError, OverflowError):
            are_numbers = False
        if not are_numbers:  # some are missing, whole numbers, or damaged
            known = [pair for pair in zip(steps, values, strict=True) if pair[1] is not None]
            steps = [step for step, _ in known]
            values = [of.number(value, tag, self._rows) for _, value in known]
        if values:
            now.series.setdefault(tag, BinnedSeries(now.capacity)).extend(steps, values)

    def _begin(self, number: int, step: int) -> Attempt:
        if len(self.attempts) == _MOST_ATTEMPTS:
            raise ConfigError(
                f"The steps of {self._rows} begin anew {_MOST_ATTEMPTS:,} times. Expected the rows "
                "of one run. Restore the file."
            )
        for earlier in self.attempts:
            earlier.end = min(earlier.end, step)
        share = max(1, (len(self.attempts) + 1) // 4)
        self.attempts.append(Attempt(number, step, step, max(_FEWEST_BINS, _BINS // share)))
        return self.attempts[-1]

    def _take_accuracy(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            attempt = self._accuracy.setdefault(record.get("attempt", 0), {})
            attempt[record["step"]] = float(record["test_accuracy"])

    @property
    def step(self) -> int | None:
        """The last row's step."""
        return self.latest.get("step")

    @property
    def is_over(self) -> bool:
        """The trainer has written how the run ended, and no row since, or its process is gone."""
        if not self.results:
            return is_gone(read_object(self.path / LOCK))
        try:
            return (self.path / "results.json").stat().st_mtime >= self._rows.stat().st_mtime
        except OSError:
            return True

    def setting(self, name: str) -> float | None:
        """A number from the trainer's settings."""
        nested = self.config.get("settings")
        value = {**self.config, **(nested if isinstance(nested, dict) else {})}.get(name)
        return value if type(value) in (int, float) else None

    @property
    def answered(self) -> int:
        """How many alerts, oldest first, rollbacks have answered: up to the last that they name."""
        last = self.rollbacks[-1] if self.rollbacks else {"step": -1}
        for i, alert in enumerate(reversed(self.alerts)):
            # As text, in which NaN equals itself.
            is_named = all(str(alert.get(k)) == str(last.get(k)) for k in ("rule", "tag", "value"))
            if is_named and alert["step"] <= last["step"]:
                return len(self.alerts) - i
        return 0

    def series(self, tag: str) -> list[tuple[int, float]]:
        """Steps and values, but for NaN, of a tag in the rows that count; of those kept whole."""
        return [
            (step, value)
            for own in self.attempts
            for step, value in zip(own.steps, own.columns[tag], strict=True)
            if step < own.end and value == value
        ]

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """Steps and test accuracies that count, in the order of steps."""
        return [(own.step, own.low) for own in self.surviving(ACCURACY.name)]

    def pieces(self, tag: str) -> list[tuple[list[Bin], list[Bin]]]:
        """The series of every attempt in two: what counts, and what came again in later bins."""
        if tag == ACCURACY.name:
            found = [
                (
                    [Bin.over([at], [value]) for at, value in sorted(values.items())],
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
