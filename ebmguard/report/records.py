"""What the records of a run folder must hold: no reader stumbles over one that is damaged.

Whatever is damaged is a ``ConfigError`` that names the file and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..alerts import Level
from ..errors import ConfigError, printable
from ..sinks.jsonl import NON_FINITE

__all__ = [
    "ACCURACY",
    "ALERT",
    "RESULTS",
    "ROLLBACK",
    "ROW",
    "Fields",
    "check",
    "checked",
    "flat",
    "is_step",
    "number",
    "numbers",
    "plain",
]

_DEEPEST = 40
_name = lru_cache(1000)(printable)  # every row has the same
_MOST_STEPS = 2**53  # up to which every whole number is a float


def is_step(value: Any) -> bool:
    """Whether it can be the number of a step."""
    return type(value) is int and 0 <= value <= _MOST_STEPS


def _is_changes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, int | float) for x in pair)
        for pair in value.values()
    )


Field = tuple[str, Callable[[Any], bool]]  # what is expected, and the test
_STEP: Field = "a step", is_step
_NUMBER: Field = "a number", lambda x: isinstance(x, int | float)
_TEXT: Field = "a text", lambda x: isinstance(x, str)
_TEXTS: Field = "texts", lambda x: isinstance(x, list) and all(isinstance(own, str) for own in x)
_COUNT: Field = "a whole number", lambda x: type(x) is int and abs(x) <= _MOST_STEPS
_FLAG: Field = "true or false", lambda x: isinstance(x, bool)
_MAYBE: Field = "a number or null", lambda x: x is None or isinstance(x, int | float)
_LEVEL: Field = "one of INFO, WARN, ERROR", list(Level.__members__).__contains__

# By names of fields; one that may be missing ends in "?".
Fields = dict[str, Field]
_CAUSE: Fields = {"step": _STEP, "rule": _TEXT, "tag": _TEXT, "value": _NUMBER, "message": _TEXT}
ROW: Fields = {
    "step": _STEP,
    "recovery/attempt?": ("a count", lambda x: _NUMBER[1](x) and 0 <= x <= _MOST_STEPS),
}
ALERT = _CAUSE | {"level": _LEVEL, "limit": _NUMBER, "remedies": _TEXTS, "follows?": _TEXT}
ROLLBACK = (
    _CAUSE
    | {"restored_step": _STEP, "attempt": _COUNT, "budget_left": _COUNT, "certified?": _FLAG}
    | {"relapse": _FLAG, "changes": ("pairs of numbers by name", _is_changes)}
)
ACCURACY: Fields = {"step": _STEP, "test_accuracy": _NUMBER, "attempt?": _COUNT}
RESULTS: Fields = {
    "diverged_at?": ("a step or null", lambda x: x is None or is_step(x)),
    **dict.fromkeys(("wall_seconds?", "accuracy?", "best_accuracy?"), _MAYBE),
    **dict.fromkeys(("median_abs_gap_last_100?", "grad_scale?", "ess?"), _MAYBE),
    **dict.fromkeys(("reference_grad_scale?", "reference_ess?"), _MAYBE),
}


def check(record: Mapping[str, Any], fields: Fields, where: Path) -> None:
    """Refuse a record without what readers need."""
    for key, (expected, is_one) in fields.items():
        name = key.removesuffix("?")
        if name in record:
            if is_one(record[name]):
                continue
            problem = f"has {name}={str(record[name])[:40]!r}"
        elif key == name:
            problem = f"has no {name!r}"
        else:
            continue
        raise ConfigError(
            f"{where} {problem}, expected {expected}, in {str(record)[:80]}. It should be a file "
            "that the guard or its trainer wrote: restore or remove it."
        )


def checked(
    records: Iterable[Mapping[str, Any]], fields: Fields, where: Path
) -> list[dict[str, Any]]:
    """The records of a file, plain."""
    found = [plain(record, where) for record in records]
    for record in found:
        check(record, fields, where)
    return found


def plain(value: Any, where: Path, depth: int = 0) -> Any:
    """A value of JSON with printable texts, and as a float what is beyond every step."""
    if isinstance(value, str):
        return NON_FINITE.get(value, printable(value))
    if isinstance(value, int) and abs(value) > _MOST_STEPS:
        return _as_float(value)
    if depth > _DEEPEST:
        raise ConfigError(f"{where} is nested more than {_DEEPEST} deep. Restore or remove it.")
    if isinstance(value, dict):
        return {printable(key): plain(own, where, depth + 1) for key, own in value.items()}
    if isinstance(value, list):
        return [plain(own, where, depth + 1) for own in value]
    return value


def numbers(row: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """A row as floats by tag, but for its step; what is null is missing."""
    found: dict[str, Any] = {
        _name(tag): own if type(own) is float else number(own, tag, where)
        for tag, own in row.items()
        if own is not None
    }
    return found | {"step": row["step"]}


def number(value: Any, tag: str, where: Path) -> float:
    """A number of a row as a float."""
    if isinstance(value, int | float):
        return _as_float(value)
    raise ConfigError(
        f"A row of {where} has {tag}={str(value)[:40]!r}, expected a number. Remove the line or "
        "restore the file."
    )


def flat(found: Mapping[str, Any], between: str, outer: str = "") -> dict[str, Any]:
    """Nested settings by joined names."""
    values: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, between, f"{outer}{name}{between}")
        else:
            values[outer + name] = value
    return values


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
