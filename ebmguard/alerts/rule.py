"""What every rule is: data with a name, and a watcher that reads one row per step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..errors import ConfigError, DivergenceError, Stateful
from .alert import Level

__all__ = ["CALM", "NOT_CALM", "UNKNOWN", "Limits", "Memory", "Reading", "Rule", "Watcher"]
__all__ += ["check_rule", "check_settings"]


class Reading(NamedTuple):
    """What a rule says of one row.

    Attributes:
        level: None while nothing is wrong.
        calm: whether the statistics are inside the tighter band that ends an episode; None where
            the row does not tell.
        tag, value, limit, window: as in :class:`~ebmguard.Alert`; only meaningful with a level.
        remedies: all that helps, likeliest first: of :class:`~ebmguard.alerts.Remedy`, or words.
            An alert gets two that the run allows, and a rollback tries them in this order.
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


class Memory(Stateful):
    """The memory of a rule in numbers and lists of them, of which a copy need not be checked."""


@runtime_checkable
class Watcher(Protocol):
    """The memory of one rule.

    It may have ``limits() -> Mapping[str, Limits]``, by tag those that held for the row read last,
    which reports draw, and ``after_rollback()``, after which counts of steps out of range start
    anew.
    """

    def read(self, row: Mapping[str, float]) -> Reading:
        """Take one row, which may lack any tag.

        That of a step may come again with more in it: after :meth:`load_state_dict` of an earlier
        state, and the rows between that and the step, which are read anew.
        """

    def state_dict(self) -> dict[str, Any]:
        """The whole memory as JSON-able data, which later rows do not change."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; KeyError, TypeError or ValueError if it is damaged."""


class Rule(Protocol):
    """Data that says what to watch for: any object that has these, without inheriting from it.

    It may have ``error``, the class that ``action="raise"`` raises instead of
    :class:`~ebmguard.DivergenceError`; for reports ``limits() -> Mapping[str, Limits]``, fixed
    limits by tag, and ``owed``, the tags where NaN is an alarm and not just unknown.
    """

    @property
    def name(self) -> str:
        """What its alerts are called; different for each rule of a run."""

    @property
    def calm_steps(self) -> int:
        """Observations inside the calm band that end an episode."""

    @property
    def cooldown(self) -> int:
        """Observations after a report in which no new episode's WARN is reported."""

    def watcher(self) -> Watcher:
        """A new watcher, which remembers nothing yet."""


def check_settings(rule: Any, *settings: tuple[bool, str]) -> None:
    """Refuse, with a ``ConfigError``, a rule of which not all is as it is expected in words."""
    for is_kept, expected in settings:
        if not is_kept:
            names = [x for x in dict.fromkeys(re.findall("[a-z_]+", expected)) if hasattr(rule, x)]
            got = ", ".join(f"{name}={getattr(rule, name)}" for name in names)
            raise ConfigError(f"Rule {rule.name!r}: expected {expected}, but got {got}.")


def check_rule(rule: Any) -> None:
    """Refuse, with a ``ConfigError``, what is no :class:`Rule`."""
    lacks = [own for own in ("name", "calm_steps", "cooldown", "watcher") if not hasattr(rule, own)]
    problem = ""
    if isinstance(rule, type):
        problem = "is a class: pass an instance of it"
    elif lacks:
        problem = f"lacks {', '.join(lacks)}"
    elif not isinstance(rule.name, str) or not all(
        isinstance(count, int) and count >= 0 for count in (rule.calm_steps, rule.cooldown)
    ):
        counts = f"calm_steps={rule.calm_steps!r} and cooldown={rule.cooldown!r}"
        problem = f"has name={rule.name!r}, {counts}"
    else:
        error, watcher = getattr(rule, "error", DivergenceError), rule.watcher()
        reading: object = watcher.read({}) if isinstance(watcher, Watcher) else None
        if not (isinstance(error, type) and issubclass(error, DivergenceError)):
            problem = f"has error={error!r}"
        elif not isinstance(reading, Reading):
            problem = f"has a watcher {watcher!r}, of which read({{}}) is {reading!r}"
    if problem:
        raise ConfigError(
            f"{rule!r} {problem}. A rule has a name (text), calm_steps and cooldown (whole numbers "
            "from 0 on), perhaps an error (a subclass of DivergenceError), and a method watcher() "
            "that returns a new ebmguard.alerts.Watcher, whose read(row) returns a Reading."
        )
