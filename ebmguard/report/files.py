"""Reads files that may be damaged, hostile, or still being written, and checks their records."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ..alerts import Level
from ..errors import ConfigError, printable
from ..sinks.jsonl import NON_FINITE, from_json, parse_line
from ..sinks.safe_files import safe_open

try:  # four times as fast; of what it refuses, json has the last word
    from orjson import loads as _loads
except ImportError:
    from json import loads as _loads  # type: ignore[assignment]

__all__ = [
    *("Fields", "GrowingFile", "batches", "check", "flattened", "listed", "no_run", "number"),
    *("read_object", "run_folders", "similar_runs"),
]

ROWS = "metrics.jsonl"
_MOST_NAMED = 6
_CHUNK = 2 << 20
_LONGEST = 8 << 20
_REMEMBERED = 4096  # bytes, by which a file that was cut off is recognised
_DEEPEST, _MOST_STEPS = 40, 2**53  # up to there every whole number is a float
_LARGEST = 2000  # characters of a text, entries of an object: no guard writes more into one


@lru_cache(50_000)  # every row has the same
def _name(text: str) -> str:
    return printable(text if len(text) <= _LARGEST else f"{text[:_LARGEST]}…")


def is_step(value: Any) -> bool:
    """Return whether this value can be a step number."""
    return type(value) is int and 0 <= value <= _MOST_STEPS


def _are_pairs(value: Any) -> bool:
    pairs = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(x, list) and [*map(_NUMBER[1], x)] == [True, True] for x in pairs)


# The expected kind and its test by the name of a field; a name that ends in "?" may be missing.
Fields = dict[str, tuple[str, Callable[[Any], bool]]]
_STEP = "a step", is_step
_NUMBER = "a number", lambda x: isinstance(x, int | float)
_TEXT = "a text", lambda x: isinstance(x, str)
_COUNT = "a whole number", lambda x: type(x) is int and abs(x) <= _MOST_STEPS
_FLAG = "true or false", lambda x: isinstance(x, bool)
_MAYBE = "a number or null", lambda x: x is None or isinstance(x, int | float)
_CAUSE: Fields = {"step": _STEP, "rule": _TEXT, "tag": _TEXT, "value": _NUMBER, "message": _TEXT}
ROW: Fields = {
    "step": _STEP,
    "recovery/attempt?": ("a count", lambda x: _NUMBER[1](x) and 0 <= x <= _MOST_STEPS),
}
ALERT: Fields = _CAUSE | {
    "level": ("one of INFO, WARN, ERROR", list(Level.__members__).__contains__),
    "limit": _NUMBER,
    "remedies": ("texts", lambda x: isinstance(x, list) and all(isinstance(y, str) for y in x)),
    "follows?": _TEXT,
    "action?": _TEXT,
}
ROLLBACK: Fields = (
    _CAUSE
    | {"restored_step": _STEP, "attempt": _COUNT, "budget_left": _COUNT, "certified?": _FLAG}
    | {"relapse": _FLAG, "changes": ("pairs of numbers by name", _are_pairs)}
)
ACCURACY: Fields = {"step": _STEP, "test_accuracy": _NUMBER, "attempt?": _COUNT}
RESULTS: Fields = {
    "diverged_at?": ("a step or null", lambda x: x is None or is_step(x)),
    **dict.fromkeys(("wall_seconds?", "accuracy?", "best_accuracy?", "grad_scale?"), _MAYBE),
    **dict.fromkeys(("median_abs_gap_last_100?", "ess?", "reference_ess?"), _MAYBE),
    "reference_grad_scale?": _MAYBE,
}


def check(record: Mapping[str, Any], fields: Fields, where: Path) -> None:
    """Raise a ``ConfigError`` if a record lacks a field that readers need."""
    for key, (expected, is_one) in fields.items():
        name = key.removesuffix("?")
        if is_one(record[name]) if name in record else key != name:
            continue
        has = f"{name}={str(record[name])[:40]!r}" if name in record else f"no {name!r}"
        raise ConfigError(
            f"{where} has {has}, expected {expected}, in {str(record)[:80]}. It should be a file "
            "that the guard or its trainer wrote: restore or remove it."
        )


def _plain(value: Any, where: Path, depth: int = 0) -> Any:
    """Return a value of JSON with printable texts, and numbers beyond every step as floats."""
    if isinstance(value, str):
        is_fit = len(value) <= _LARGEST and value.isascii() and value.isprintable()  # as nearly all
        return NON_FINITE.get(value, value if is_fit else _name(value))
    if isinstance(value, int) and abs(value) > _MOST_STEPS:
        return number(value, "", where)
    if depth > _DEEPEST:
        raise ConfigError(f"{where} is nested more than {_DEEPEST} deep. Restore or remove it.")
    if isinstance(value, dict):
        first = islice(value.items(), _LARGEST)
        return {_name(key): _plain(item, where, depth + 1) for key, item in first}
    if isinstance(value, list):
        return [_plain(item, where, depth + 1) for item in value]
    return value


def numbers(row: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the numbers of a row as floats by tag, and its step; null values are left out."""
    return {
        _name(tag): value if type(value) is float else number(value, tag, where)
        for tag, value in row.items()
        if value is not None
    } | {"step": row["step"]}


def number(value: Any, tag: str, where: Path) -> float:
    """Return a number of a row as a float, or raise a ``ConfigError``."""
    if not isinstance(value, int | float):
        raise ConfigError(
            f"A row of {where} has {tag}={str(value)[:40]!r}, expected a number. Remove the line "
            "or restore the file."
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def flattened(settings: Mapping[str, Any], between: str, outer: str = "") -> dict[str, Any]:
    """Flatten nested settings to joined names."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            values |= flattened(value, between, f"{outer}{name}{between}")
        else:
            values[outer + name] = value
    return values


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the runs at these paths; a folder that is not a run stands for the runs in it."""
    return [run for path in paths for run in _runs_at(path) or [path]]


def _runs_at(path: Path) -> list[Path]:
    """Return the path if it is a run, else the runs in it."""
    return [path] if os.path.lexists(path / ROWS) else _inside(path)


def _inside(path: Path) -> list[Path]:
    """Return the runs with rows in a folder, else those in its folders, by name."""
    try:
        files = (sorted(path.glob(f"{level}/{ROWS}")) for level in ("*", "*/*"))
        runs = ([rows.parent for rows in group if rows.stat().st_size] for group in files)
        return next(filter(None, runs), [])
    except (OSError, ValueError):  # it cannot be listed, or is a name that no folder has
        return []


def similar_runs(path: Path) -> list[Path]:
    """Suggest runs for a path that is no run: those in it, or similar names, likeliest first."""
    if runs := _inside(path):
        return runs
    for above in path.parents:
        runs = _runs_at(above)
        if runs or os.path.isdir(above):
            break
    return sorted(runs, key=lambda run: -SequenceMatcher(None, str(path), str(run)).ratio())


def listed(runs: list[Path]) -> str:
    """Return the names of some of these runs, and the number of the others."""
    rest = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
    return ", ".join(map(printable, runs[:_MOST_NAMED])) + rest


def no_run(path: Path) -> ConfigError:
    """Return the error that says why a path is no run, and suggests runs."""
    runs, what = similar_runs(path), f"holds no {ROWS} with rows, so that it is no run"
    if not os.path.lexists(path):
        what = "does not exist"
    elif not os.path.isdir(path):
        what = "is a file; expected a run's folder"
    elif os.path.lexists(path / ROWS):
        what, runs = f"holds a {ROWS} without rows: no step of its run is over yet", []
    elif _inside(path):
        what = f"is no run but holds {len(runs)}"
    fix = f"Runs that are there: {listed(runs)}." if runs else "Name a trainer's folder or log_dir."
    return ConfigError(f"{path} {what}. {fix}")


class GrowingFile:
    """The records of a JSON lines file that may still grow; every record comes once.

    A half-written last line is left for later. The file need not exist. If a resumed trainer has
    cut off lines that were read, reading starts anew. With ``fields`` records are checked.
    """

    def __init__(self, path: Path, fields: Fields | None = None) -> None:
        self.path, self._fields = path, fields
        self._offset, self._before = 0, b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether earlier records are void, and the next records, about two megabytes.

        Raises:
            ConfigError: the file cannot be read, a complete line is not a JSON object or longer
                than eight megabytes, or a record lacks a field.
        """
        file = safe_open(self.path)
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
        records = self._records([line for line in data.split(b"\n") if line])
        if self._fields is not None:
            records = [_plain(record, self.path) for record in records]
            for record in records:
                check(record, self._fields, self.path)
        return anew, records

    def _records(self, lines: list[bytes]) -> list[dict[str, Any]]:
        try:
            # Parsing one text, in which keys repeat, takes less than half of the time.
            records: list[Any] = _loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            records = []
        if len(records) != len(lines) or not all(type(record) is dict for record in records):
            records = [parse_line(line) for line in lines]
            if None in records:
                raise self._damage(lines[records.index(None)], "not a JSON object")
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
        had_records = self._offset > 0
        self._offset, self._before = 0, b""
        return had_records


def batches(path: Path, fields: Fields | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yield the records that a file of JSON lines holds now, in batches."""
    return (records for _, records in iter(GrowingFile(path, fields).read, (False, [])))


def read_object(path: Path, fields: Fields | None = None) -> dict[str, Any]:
    """Return the plain JSON object in a file; empty if the file is missing or half written."""
    file = safe_open(path, most=_LONGEST)
    if file is None:
        return {}
    try:
        with file:
            text = file.read().rstrip()
        if not text or (text.startswith(b"{") and not text.endswith(b"}")):
            return {}  # half written
        parsed = json.loads(text)
        reason = f"it is a {type(parsed).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        parsed, reason = None, printable(error)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} is not a JSON object: {reason}. Restore or remove it.")
    plain: dict[str, Any] = _plain(parsed, path)
    check(plain, fields or {}, path)
    return plain
