"""The parts of every rule: data with a name, a watcher that reads rows, and its alerts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple, Protocol, Self, cast, get_type_hints, runtime_checkable

from ..errors import MISFITS, ConfigError, DivergenceError, Stateful
from .remedies import names_of

__all__ = ["CALM", "NOT_CALM", "UNKNOWN", "Alert", "Level", "Limits", "Memory", "Reading", "Rule"]
__all__ += ["Watcher", "check_rule", "check_settings", "read_by"]


class Level(IntEnum):
    """The severity of an alert. The numbers are those of the scalar ``guard/alert_level``."""

    INFO = 0
    WARN = 1
    ERROR = 2


@dataclass(frozen=True)
class Alert:
    """One rule that fired at one step.

    Attributes:
        rule, level, step: the rule's name, how bad it is, and the step of its row.
        tag, value: the diagnostic, without the ``guard/`` prefix; it may be NaN or infinite.
        limit: the nearest value at which the rule would have reported the same level.
        window: past observations that the limit rests on, or for which the value stayed out of
            range; 0 where the rule needs no past.
        remedies: the two likeliest that the run allows; all of them from a judge without a guard.
        member: the model of an ensemble, along the flattened model dimensions, if it is one alone.
        follows: the rule whose ERROR was going on when this trouble began; no remedies come then.
    """

    rule: str
    level: Level
    step: int
    tag: str
    value: float
    limit: float
    window: int
    remedies: tuple[str, ...] = ()
    member: int | None = None
    follows: str | None = None

    @property
    def message(self) -> str:
        """The alert in words."""
        limit = f"limit {self.limit:.4g}"
        limit += f" over the last {self.window} steps" if self.window else ""
        if self.window and not self.limit:  # another number is beyond their common limit already
            limit = f"out of range, judged by the last {self.window} steps"
        where = f"step {self.step}" + ("" if self.member is None else f", member {self.member}")
        what = f"{self.tag} = {self.value:.4g} ({limit})."
        if self.follows is not None:
            what += f" Follows {self.follows}."
        elif self.remedies:
            what += f" Likeliest remedies: {'; '.join(self.remedies)}."
        return f"{self.level.name} {self.rule} at {where}: {what}"

    def record(self) -> dict[str, Any]:
        """The alert as a plain dict with its message; without fields that are None."""
        words = {
            "remedies": [*map(str, self.remedies)],
            "named": names_of(self.remedies),
            "message": self.message,
        }
        record = asdict(self) | {"level": self.level.name} | words
        return {name: value for name, value in record.items() if value is not None}


class Reading(NamedTuple):
    """The answer of a rule to one row.

    Attributes:
        level: None while nothing is wrong.
        calm: whether the row counts towards the end of an episode; None where nobody knows.
        tag, value, limit, window: as in :class:`~ebmguard.Alert`; only meaningful with a level.
        remedies: all that help, in the order in which a rollback tries them: members of
            :class:`~ebmguard.alerts.Remedy`, or words.
    """

    level: Level | None
    calm: bool | None
    tag: str = ""
    value: float = math.nan
    limit: float = math.nan
    window: int = 0
    remedies: tuple[str, ...] = ()


CALM, NOT_CALM, UNKNOWN = Reading(None, True), Reading(None, False), Reading(None, None)


class Limits(NamedTuple):
    """The range in which no rule says WARN, and the wider one in which none says ERROR."""

    low: float = -math.inf
    high: float = math.inf
    error_low: float = -math.inf
    error_high: float = math.inf

    def within(self, other: Limits) -> Limits:
        """The range that keeps to both."""
        pairs = zip((max, min, max, min), self, other, strict=True)
        return Limits(*(narrower(a, b) for narrower, a, b in pairs))


@runtime_checkable
class Watcher(Protocol):
    """The memory of one rule.

    It may have ``limits() -> Mapping[str, Limits]``, by tag those that held for the row read last;
    ``after_rollback()``, after which counts of steps out of range start anew; and ``calm() ->
    tuple[float, float] | None``, the sizes |gap| + ``f_pos/std`` between which none of the next
    rows is an ERROR, if all is finite. Without it, or at None, every row is read at its step.
    """

    def read(self, row: Mapping[str, float]) -> Reading:
        """Take one row, which may lack any tag. Where a step's row comes again with more in it, an
        earlier state was loaded before, and the rows since then were read anew."""

    def state_dict(self) -> dict[str, Any]:
        """The whole memory as JSON-able data, which later rows do not change."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; raise KeyError, TypeError or ValueError if it is damaged."""


class Rule(Protocol):
    """A rule is any object with these attributes. It need not inherit from this class.

    It may have ``error``, the :class:`~ebmguard.DivergenceError` of ``action="raise"``; for
    reports ``limits() -> Mapping[str, Limits]``, fixed limits by tag, and ``owed``, the tags where
    NaN is an alarm and not just unknown.
    """

    @property
    def name(self) -> str:
        """The name of its alerts, different for every rule of a run."""

    def watcher(self) -> Watcher:
        """A new watcher, which remembers nothing yet."""


@dataclass
class Memory(Stateful):
    """The memory of a rule: the fields that have a default, numbers and lists of them."""

    def _saved(self) -> dict[str, Any]:
        owner: Any = type(self)
        return _remembered(owner)

    def copy(self) -> Self:
        """Return another with the same memory, without the checks of a saved state."""
        other = object.__new__(type(self))
        other.__dict__ = {
            name: [x[:] if type(x) is list else x for x in value] if type(value) is list else value
            for name, value in vars(self).items()
        }
        return other


@cache
def _remembered(owner: type[Any]) -> dict[str, Any]:
    kinds, missing = get_type_hints(owner), (MISSING, MISSING)
    names = [
        field.name for field in fields(owner) if (field.default, field.default_factory) != missing
    ]
    return {name: kinds[name] for name in names}


def check_settings(rule: Any, kept: Mapping[str, bool]) -> None:
    """Refuse, with a ``ConfigError``, settings that break texts such as "0 < low <= high"."""
    for text in (text for text, is_kept in kept.items() if not is_kept):
        names = [word for word in text.replace(",", "").split() if word.isidentifier()]
        got = ", ".join(f"{name}={getattr(rule, name)}" for name in names)
        what = f"Rule {rule.name!r}" if hasattr(rule, "name") else f"Bound of {rule.tag!r}"
        raise ConfigError(f"{what}: expected {text}, but got {got}.")


def check_rule(rule: Any) -> None:
    """Refuse, with a ``ConfigError``, an object that is no :class:`Rule`."""
    lacks = [name for name in ("name", "watcher") if not hasattr(rule, name)]
    error = getattr(rule, "error", DivergenceError)
    problem = ""
    if isinstance(rule, type):
        problem = "is a class: pass an instance of it"
    elif lacks:
        problem = f"lacks {', '.join(lacks)}"
    elif not isinstance(rule.name, str):
        problem = f"has name={rule.name!r}"
    elif not (isinstance(error, type) and issubclass(error, DivergenceError)):
        problem = f"has error={error!r}"
    else:
        watcher = rule.watcher()
        problem = "" if isinstance(watcher, Watcher) else f"has a watcher {watcher!r}"
    if problem:
        raise ConfigError(
            f"{rule!r} {problem}. A rule has a name (text), perhaps an error (a subclass of "
            "DivergenceError), and a method watcher() that returns a new ebmguard.alerts.Watcher, "
            "whose read(row) returns a Reading."
        )
    read_by([(rule.name, watcher)], {})


def read_by(watchers: Iterable[tuple[str, Watcher]], row: Mapping[str, float]) -> list[Reading]:
    """Return the watchers' readings of a row, in Python's numbers; else raise a ``ConfigError``."""
    readings: list[Reading] = []
    for name, watcher in watchers:
        try:
            answer: Any = watcher.read(row)
            # Nearly all answers are one of these two.
            reading = answer if answer is CALM or answer is UNKNOWN else _in_numbers(answer)
            why = f"returned {repr(answer)[:80]}" if reading is None else ""
        except MISFITS as error:
            reading, why = None, f"raised {type(error).__name__}: {error}"
        if reading is None:
            raise ConfigError(
                f"Rule {name!r}: read(row) should return an ebmguard.alerts.Reading of a Level or "
                f"None, numbers and texts, whatever the row lacks, but {why}"
            )
        readings.append(reading)
    return readings


def _in_numbers(answer: object) -> Reading | None:
    if not isinstance(answer, Reading):
        return None
    level, calm, tag, *numbers, remedies = cast("tuple[Any, ...]", answer)
    if level is None and (calm is None or type(calm) is bool):
        return answer
    calm, level = calm and bool(calm), level if level is None else Level(level)
    value, limit, window = map(float, numbers)
    texts = [tag, *remedies] if isinstance(remedies, tuple | list) else [None]
    if not all(isinstance(text, str) for text in texts):
        return None
    return Reading(level, calm, tag, value, limit, int(window), tuple(remedies))
