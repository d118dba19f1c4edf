"""The one reader of run folders: rows, alerts, rollbacks, and the files of the trainer."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..alerts import Bands, Level, Limits, Verdict, VerdictTracker
from ..errors import ConfigError, printable
from ..sinks import LOCK, is_gone
from ..tags import ALERT_LEVEL, ATTEMPT, BETA_STAR, LOG_EVERY, Tag, is_guard_tag, weight_tag
from . import files
from .bins import Bin, BinnedSeries, ThinnedSeries

__all__ = ["ACCURACY", "Attempt", "RecordedRun", "first_and_last", "outcome", "value_of"]

# Its tag is the name of its file: a trainer may log another number called accuracy.
ACCURACY = Tag("accuracy.jsonl", "test accuracy", "share", "of the evaluations")
# Bins of a series. From the fourth attempt on they share them: who resumes every hour fills no
# memory, and no page.
_BINS, _FEWEST_BINS = 600, 8
_MOST_ATTEMPTS, _MOST_TRAINER_TAGS = 1000, 200
# Values of an attempt that are kept whole per bin; records at both ends of a table.
_WHOLE, _SHOWN = 16, 200
# From so many rows on, the moving limits are followed in the last rows of a batch only, in so many:
# they depend on fewer past rows. See ebmguard.alerts.GrowthRule.
_ALL_FOLLOWED, _FOLLOWED = 10_000, 100


def value_of(row: Mapping[str, float], tag: str) -> float | None:
    """Return a diagnostic of a row; None if the row lacks it.

    At β* = 0 the weights are uniform, so the value is taken at the reference exponent.
    """
    return row.get(weight_tag(tag, row.get(BETA_STAR, math.nan)), row.get(tag))


def first_and_last(records: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return the first and the last of many records with their indices."""
    count = len(records)
    shown = *range(count)[:_SHOWN], *range(max(_SHOWN, count - _SHOWN), count)
    return [(number, records[number]) for number in shown]


@dataclass
class Attempt:
    """The rows between two rollbacks or resumes, or until the end."""

    number: int  # of rollbacks before
    first: int  # its steps
    last: int
    capacity: int = _BINS
    # Its rows count up to here: the first step that came again later.
    end: float = math.inf
    series: dict[str, BinnedSeries] = field(default_factory=dict)  # by tag
    whole: dict[str, ThinnedSeries] = field(default_factory=dict)
    bands: dict[str, BinnedSeries] = field(default_factory=dict)  # both edges of those that move


class RecordedRun:
    """The contents of a run folder so far; :meth:`update` reads what is new.

    The guard's ``metrics.jsonl``, ``alerts.jsonl`` and ``recovery.jsonl`` are enough; a trainer's
    ``config.json``, ``accuracy.jsonl`` and ``results.json`` are used if they exist. If a step was
    repeated, only its last pass counts, and nothing after the earlier passes.

    Args:
        path: the folder, which need not exist yet.
        tags: diagnostics to keep for charts, as extremes in 600 stretches.
        whole: tags to keep with every value, for :meth:`series`.
    """

    def __init__(self, path: Path, tags: Iterable[str] = (), whole: Iterable[str] = ()) -> None:
        self.path = path
        # It is called with every batch of rows, as floats by tag.
        self.on_rows: Callable[[list[dict[str, Any]]], object] | None = None
        self.name = printable(path)
        self.tags, self.whole = tuple(tags), tuple(whole)
        self.alerts: list[dict[str, Any]] = []  # oldest first, as are rollbacks
        self.rollbacks: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []  # some come late, and out of order
        self.config: dict[str, Any] = {}  # empty where the trainer wrote none, as are results
        self.results: dict[str, Any] = {}
        self._rows = path / files.ROWS
        # Every file with the function that takes its records, and the one that forgets them. Rows
        # are checked as they come.
        self._files: list[tuple[files.GrowingFile, Callable[..., None], Callable[[], None]]] = [
            (files.GrowingFile(self._rows), self._take_rows, self._start)
        ]
        for name, fields, kept in (
            ("alerts", files.ALERT, self.alerts),
            ("recovery", files.ROLLBACK, self.rollbacks),
            ("accuracy", files.ACCURACY, self._evaluations),
        ):
            file = files.GrowingFile(path / f"{name}.jsonl", fields)
            self._files.append((file, kept.extend, kept.clear))
        self._start()

    def _start(self) -> None:
        self.attempts: list[Attempt] = []  # a step may be in several of them
        self.trainer_tags: list[str] = []  # the trainer's numbers, kept if ``tags`` are
        self.latest: dict[str, Any] = {}  # the last row
        self.row_count = 0
        self._thinned: dict[float, int] = {}  # the first step by log_every
        self.bands = Bands()  # as they held for the last row, where the run has tags
        self._held: dict[str, Limits] = {}
        # Attempt, step and level, in this order, where the level of the rows that count changes.
        self._levels: list[tuple[int, int, int]] = []
        self._level: Any = None  # of the last row; None at the beginning of a stretch

    @classmethod
    def read(cls, path: Path, tags: Iterable[str] = (), whole: Iterable[str] = ()) -> RecordedRun:
        """Read the run in a folder; a ``ConfigError`` if it has no rows or is damaged."""
        run = cls(path, tags, whole)
        run.update()
        if not run.attempts:
            raise files.no_run(path)
        return run

    def update(self) -> bool:
        """Read what was written since the last time; return whether anything was new."""
        before, is_new = (self.config, self.results), False
        for file, take, forget in self._files:
            for anew, records in iter(file.read, (False, [])):
                if anew:
                    forget()
                take(records)
                is_new = True
        self.config = files.read_object(self.path / "config.json")
        self.results = files.read_object(self.path / "results.json", files.RESULTS)
        return is_new or before != (self.config, self.results)

    def _take_rows(self, rows: list[dict[str, Any]]) -> None:
        """Split a batch where an attempt, the use of weights or a thinning begins or ends."""
        last = self.attempts[-1].last if self.attempts else -1
        kind, begin = None, 0
        for i, row in enumerate(rows):
            step = row.get("step", -1)
            row_kind = row.get(ATTEMPT, 0), row.get(BETA_STAR) == 0, row.get(LOG_EVERY)
            if row_kind != kind or not files.is_step(step):
                files.check(row, files.ROW, self._rows)
            if step <= last or row_kind != kind:
                self._take_stretch(rows[begin:i])
                begin, kind, self._level = i, row_kind, None
            if (level := row.get(ALERT_LEVEL)) != self._level and level in (0, 1, 2):
                place = int(row_kind[0]), step
                while self._levels and self._levels[-1][:2] >= place:  # the step comes again
                    self._levels.pop()
                self._levels.append((*place, int(level)))
                self._level = level
            last = step
        self._take_stretch(rows[begin:])
        if self.on_rows:
            self.on_rows([files.numbers(row, self._rows) for row in rows])

    def _take_stretch(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        where, steps, now = self._rows, [row["step"] for row in rows], self._attempt(rows[0])
        now.last = steps[-1]
        for tag in self.whole:
            known = self._known(steps, [row.get(tag) for row in rows], tag)
            if tag.startswith("nonfinite/"):  # only values above 0, so that all of them are kept
                bad = [pair for pair in zip(*known, strict=True) if pair[1] > 0]
                known = [step for step, _ in bad], [value for _, value in bad]
            now.whole.setdefault(tag, ThinnedSeries(_WHOLE * now.capacity)).extend(*known)
        if self.tags:
            names = sorted(set[str]().union(*rows).difference(self.tags, self.trainer_tags))
            room = _MOST_TRAINER_TAGS - len(self.trainer_tags)
            self.trainer_tags += [name for name in names if not is_guard_tag(name)][:room]
            for tag in (*self.tags, *self.trainer_tags):
                self._draw(now, rows, steps, tag)
            for row in rows if self.row_count < _ALL_FOLLOWED else rows[-_FOLLOWED:]:
                self._follow(now, files.numbers(row, where))
        self.latest = files.numbers(rows[-1], where)
        if (every := self.latest.get(LOG_EVERY, 1)) > 1:
            self._thinned.setdefault(every, steps[0])
        self.row_count += len(rows)

    def limits(self, tag: str) -> Limits:
        """Return the current limits of a diagnostic; during an ERROR, those before it."""
        return self._held.get(tag, self.bands.limits.get(tag, Limits()))

    def _follow(self, now: Attempt, row: Mapping[str, Any]) -> None:
        for tag, limits in self.bands.read(row).items():
            is_lost = row.get(ALERT_LEVEL) == Level.ERROR or not limits.low < limits.high
            is_lost |= not limits.error_low <= row.get(tag, math.nan) <= limits.error_high
            held = self._held[tag] = self._held.get(tag, limits) if is_lost else limits
            if tag in self.tags and math.isfinite(held.high - held.low):
                edges = now.bands.setdefault(tag, BinnedSeries(now.capacity))
                edges.extend([row["step"]] * 2, held[:2])

    def _draw(self, now: Attempt, rows: list[dict[str, Any]], steps: list[int], tag: str) -> None:
        """Add rows to a series, either all at β* = 0 or none; see :func:`value_of`."""
        column = weight_tag(tag, rows[0].get(BETA_STAR, math.nan))
        values: list[Any] = [row.get(column) for row in rows]
        if column != tag:
            values = [row.get(column, row.get(tag)) for row in rows]
        steps, values = self._known(steps, values, tag)
        if values:
            now.series.setdefault(tag, BinnedSeries(now.capacity)).extend(steps, values)

    def _known(
        self, steps: list[int], values: list[Any], tag: str
    ) -> tuple[list[int], list[float]]:
        try:
            if isinstance(sum(values), float):
                return steps, values
        except (TypeError, OverflowError):
            pass  # some are missing, whole numbers, or damaged
        known = [pair for pair in zip(steps, values, strict=True) if pair[1] is not None]
        return [step for step, _ in known], [files.number(x, tag, self._rows) for _, x in known]

    def _attempt(self, row: Mapping[str, Any]) -> Attempt:
        """Return the attempt of a row, a new one if its step or its number says so."""
        number, step = int(row.get(ATTEMPT, 0)), row["step"]
        # A trainer that is resumed without cutting its rows begins anew, too.
        if self.attempts and number == self.attempts[-1].number and step > self.attempts[-1].last:
            return self.attempts[-1]
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

    @property
    def step(self) -> int:
        """The step of the last row."""
        return int(self.latest["step"])

    @property
    def thinning(self) -> str:
        """A sentence on the steps from which rows were left out; empty if none were."""
        parts = [f"one in {n:g} from step {step:,} on" for n, step in self._thinned.items()]
        return f"rows written: {', '.join(parts)}, and all around alerts" if parts else ""

    @property
    def is_over(self) -> bool:
        """True if the run has ended: the trainer wrote its end and no row since, or is gone."""
        if not self.results:
            return is_gone(files.read_object(self.path / LOCK))
        try:
            return (self.path / "results.json").stat().st_mtime >= self._rows.stat().st_mtime
        except OSError:
            return True

    @property
    def verdict(self) -> Verdict:
        """The verdict on the run so far, as ``g.verdict``; lost if its trainer says so."""
        history = VerdictTracker()
        back = {rollback["attempt"]: rollback for rollback in self.rollbacks}
        rules = {(alert["step"], Level[alert["level"]]): alert for alert in self.alerts}
        levels, number = self._levels, self.attempts[-1].number if self.attempts else 0
        if not levels:  # rows of others: the worst of the alerts that no rollback has answered
            open_ = [(-Level[a["level"]], a["step"]) for a in self.alerts[self.answered :]]
            level, step = min(open_, default=(0, 0))
            levels = [(number, step, -level)]
        for attempt, step, level in levels:
            if attempt != history.rollbacks:
                rollback = back.get(attempt, {})
                restored, rule = rollback.get("restored_step", step), rollback.get("rule", "")
                history.rolled_back(attempt, restored, rule)
            history.update(step, level, rules.get((step, Level(level)), {}).get("rule", ""))
        last = max(back, default=0)
        if last > history.rollbacks and back[last]["step"] >= self.latest.get("step", 0):
            history.rolled_back(last, back[last]["restored_step"], back[last]["rule"])
        alert = rules.get((history.since, Level.ERROR), {})
        history.is_ended = alert.get("action", "warn") != "warn" and self.is_over
        verdict, lost_at = history.verdict, self.results.get("diverged_at")
        if lost_at is not None and not verdict.is_lost:
            return Verdict("lost", lost_at, "", verdict.rollbacks)
        return verdict

    @property
    def settings(self) -> dict[str, Any]:
        """The trainer's settings; those nested under this name in config.json come first."""
        nested = self.config.get("settings")
        others = {name: value for name, value in self.config.items() if name != "settings"}
        return others | (nested if isinstance(nested, dict) else {})

    def setting(self, name: str) -> float | None:
        """A number from the trainer's settings."""
        value = self.settings.get(name)
        return value if type(value) in (int, float) else None

    @property
    def counts(self) -> dict[str, int]:
        """Number of alerts by level, the worst first; levels without alerts are left out."""
        counts = Counter(alert["level"] for alert in self.alerts)
        return {level: counts[level] for level in ("ERROR", "WARN", "INFO") if counts[level]}

    @property
    def answered(self) -> int:
        """The number of alerts, oldest first, that rollbacks have answered."""
        last = self.rollbacks[-1] if self.rollbacks else {"step": -1}
        for i, alert in enumerate(reversed(self.alerts)):
            # As text, in which NaN equals itself.
            is_cause = all(str(alert.get(k)) == str(last.get(k)) for k in ("rule", "tag", "value"))
            if is_cause and alert["step"] <= last["step"]:
                return len(self.alerts) - i
        return 0

    def series(self, tag: str) -> list[tuple[int, float]]:
        """Return steps and finite values of a ``whole`` tag, in the rows that count."""
        pairs = ((a.end, *pair) for a in self.attempts for pair in a.whole[tag].pairs())
        return [(step, value) for end, step, value in pairs if step < end and math.isfinite(value)]

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """The steps and test accuracies that count, in the order of steps."""
        return [(span.step, span.low) for span in self.surviving(ACCURACY.name)]

    def pieces(self, tag: str) -> list[tuple[list[Bin], list[Bin]]]:
        """Split the series of every attempt in two: what counts, and what was repeated later."""
        series = [(a.series[tag].bins if tag in a.series else [], a.end) for a in self.attempts]
        if tag == ACCURACY.name:
            values: dict[int, dict[int, float]] = defaultdict(dict)
            for record in self._evaluations:
                values[record.get("attempt", 0)][record["step"]] = float(record["test_accuracy"])
            series = []
            for number, accuracies in sorted(values.items()):
                end = min((a.first for a in self.attempts if a.number > number), default=math.inf)
                bins = [Bin.over([step], [x]) for step, x in sorted(accuracies.items())]
                series.append((bins, end))
        return [
            ([x for x in bins if x.step < end], [x for x in bins if x.step >= end])
            for bins, end in series
        ]

    def surviving(self, tag: str) -> list[Bin]:
        """Return the part of a series that counts."""
        return [span for kept, _ in self.pieces(tag) for span in kept]

    def level(self, tag: str) -> Level | None:
        """Return the alert level of a diagnostic's latest value, taken alone."""
        value = value_of(self.latest, tag)
        return None if value is None else self.bands.level(tag, value)


def outcome(run: RecordedRun) -> str:
    """Return the outcome in a few words: finished, diverged, ended, or not over."""
    back, total, steps = len(run.rollbacks), run.setting("iterations"), f"{run.step + 1:,}"
    after = f" after {back} rollback{'s' if back > 1 else ''}" if back else ""
    if run.results.get("diverged_at") is not None:
        return f"DIVERGED at step {run.results['diverged_at']:,}{after}"
    if run.results:
        return f"finished {steps} steps{after}"
    steps += f" of {total:,} steps" if total else " steps"
    return f"ended after {steps}{after}" if run.is_over else f"{steps} so far{after}"
