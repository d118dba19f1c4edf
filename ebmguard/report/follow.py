"""A run folder as it is being written: everything that a page about the run shows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..alerts import Level
from ..errors import ConfigError
from .charts import ACCURACY, Bands, Limits, value_of
from .tail import Tail
from .thin import Bin, Thinned

__all__ = ["Attempt", "Followed"]

_ATTEMPT = "recovery/attempt"


class Attempt:
    """The rows from one rollback to the next, or to the end.

    Attributes:
        number: how many rollbacks there were before.
        first, last: its steps.
        series: thinned values by tag.
        bands: lower and upper edge of a moving band by tag, thinned; infinite where it is open.
    """

    def __init__(self, number: int, first: int) -> None:
        self.number = number
        self.first = self.last = first
        self.series: dict[str, Thinned] = {}
        self.bands: dict[str, tuple[Thinned, Thinned]] = {}

    def take(self, row: dict[str, Any], tags: Iterable[str], moving: dict[str, Limits]) -> None:
        """Add a row and the limits that held for it."""
        step = self.last = row["step"]
        for tag in tags:
            value = value_of(row, tag)
            if value is not None:
                self.series.setdefault(tag, Thinned()).add(step, value)
            limits = moving.get(tag)
            if limits is not None and (math.isfinite(limits.low) or math.isfinite(limits.high)):
                for edge, at in zip(
                    self.bands.setdefault(tag, (Thinned(), Thinned())), limits[:2], strict=True
                ):
                    edge.add(step, at)


class Followed:
    """What a folder holds so far; :meth:`update` takes in what is new.

    A folder of the guard alone (``metrics.jsonl``, ``alerts.jsonl``, ``recovery.jsonl``) is enough.
    A trainer's ``config.json``, ``accuracy.jsonl`` and ``results.json`` are used where they are.
    Memory is bounded: series are kept thinned.

    Args:
        path: the folder, which need not exist yet.
        tags: diagnostics to keep.

    Attributes:
        attempts: the rows, apart by rollback; a step may be in several of them.
        latest: the last row.
        limits: of each diagnostic at the last row.
        rows: how many there were.
        alerts, recoveries: records, oldest first.
        config, results: what the trainer wrote, or None.
    """

    def __init__(self, path: Path, tags: Iterable[str]) -> None:
        self.path = path
        self.tags = tuple(tags)
        self.alerts: list[dict[str, Any]] = []
        self.recoveries: list[dict[str, Any]] = []
        # By attempt and step: evaluations come late, and out of order.
        self._accuracy: dict[int, dict[int, float]] = {}
        self.config: dict[str, Any] | None = None
        self.results: dict[str, Any] | None = None
        self._tails = {
            name: Tail(path / f"{name}.jsonl")
            for name in ("metrics", "alerts", "recovery", "accuracy")
        }
        self._start()

    def _start(self) -> None:
        self.attempts: list[Attempt] = []
        self.latest: dict[str, Any] = {}
        self.rows = 0
        self._bands = Bands()

    @property
    def limits(self) -> dict[str, Limits]:
        """Of each diagnostic, as they held for the last row."""
        return self._bands.limits

    def level(self, tag: str) -> Level | None:
        """What the latest value of a diagnostic is worth by itself."""
        value = value_of(self.latest, tag)
        return None if value is None else self._bands.level(tag, value)

    @property
    def step(self) -> int | None:
        """The last row's step."""
        return self.attempts[-1].last if self.attempts else None

    @property
    def iterations(self) -> int | None:
        """Steps that the run is to have, where the trainer's settings say so."""
        config = self.config or {}
        settings = config.get("settings")
        found = {**config, **(settings if isinstance(settings, dict) else {})}.get("iterations")
        return found if isinstance(found, int) else None

    @property
    def is_over(self) -> bool:
        """The trainer has written how the run ended, and no row since."""
        if self.results is None:
            return False
        try:
            rows = (self.path / "metrics.jsonl").stat().st_mtime
            return (self.path / "results.json").stat().st_mtime >= rows
        except FileNotFoundError:
            return True

    def owes(self, tag: str) -> bool:
        """Whether a NaN of a diagnostic is an alarm, and not just unknown."""
        return self._bands.owes(tag)

    def update(self) -> bool:
        """Read what was written since the last time; say whether there was anything.

        Raises:
            ConfigError: a file does not hold what it should.
        """
        is_new = False
        for name, tail in self._tails.items():
            while True:
                anew, records = tail.read()
                if anew:
                    self._void(name)
                for record in records:
                    self._take(name, record)
                is_new |= anew or bool(records)
                if not records:
                    break
        before = self.config, self.results
        self.config = _read_object(self.path / "config.json")
        self.results = _read_object(self.path / "results.json")
        return is_new or before != (self.config, self.results)

    def pieces(self, tag: str) -> list[tuple[list[Bin], list[Bin]]]:
        """The series of every attempt in two: what led to the present state, and what was undone.

        The latter are the steps that a rollback took back, which come again in a later attempt.
        """
        if tag == ACCURACY.tag:
            return [self._evaluations(number) for number in sorted(self._accuracy)]
        pieces: list[tuple[list[Bin], list[Bin]]] = []
        end = math.inf
        for attempt in reversed(self.attempts):
            bins = attempt.series[tag].bins if tag in attempt.series else []
            kept = [own for own in bins if own.step < end]
            pieces.insert(0, (kept, bins[len(kept) :]))
            end = min(end, attempt.first)
        return pieces

    def surviving(self, tag: str) -> list[Bin]:
        """The series of the steps that led to the present state."""
        return [own for kept, _ in self.pieces(tag) for own in kept]

    def _evaluations(self, number: int) -> tuple[list[Bin], list[Bin]]:
        end = min((a.first for a in self.attempts if a.number > number), default=math.inf)
        bins = [_bin(step, value) for step, value in sorted(self._accuracy[number].items())]
        kept = [own for own in bins if own.step < end]
        return kept, bins[len(kept) :]

    def _void(self, name: str) -> None:
        if name == "metrics":
            self._start()
        elif name == "accuracy":
            self._accuracy.clear()
        else:
            (self.alerts if name == "alerts" else self.recoveries).clear()

    def _take(self, name: str, record: dict[str, Any]) -> None:
        try:
            if name == "metrics":
                self._take_row(record)
            elif name == "accuracy":
                attempt = self._accuracy.setdefault(int(record.get("attempt", 0)), {})
                attempt[int(record["step"])] = float(record["test_accuracy"])
            else:
                (self.alerts if name == "alerts" else self.recoveries).append(record)
        except KeyError as error:
            raise ConfigError(
                f"A line of {self._tails[name].path} has no {error}: {str(record)[:80]}. Expected "
                "a file that the guard or its trainer wrote."
            ) from error

    def _take_row(self, row: dict[str, Any]) -> None:
        step, number = row["step"], int(row.get(_ATTEMPT, 0))
        now = self.attempts[-1] if self.attempts else None
        # A trainer that is resumed without cutting its rows begins anew, too.
        if now is None or number != now.number or step <= now.last:
            self.attempts.append(Attempt(number, step))
        self.attempts[-1].take(row, self.tags, self._bands.read(row))
        self.latest = row
        self.rows += 1


def _bin(step: int, value: float) -> Bin:
    return Bin(step, value, step, value, step) if math.isfinite(value) else Bin(step, bad_at=step)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except FileNotFoundError:
        return None
    if not text.endswith("}"):
        return None  # half written
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Restore or remove it.") from error
    return found if isinstance(found, dict) else None
