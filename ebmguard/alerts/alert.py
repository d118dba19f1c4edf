"""An alert is data: what fired, where, by how much, and what usually helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from ..errors import ConfigError

__all__ = ["Alert", "Level"]


class Level(IntEnum):
    """How bad it is. The numbers are those of the scalar ``guard/alert_level``."""

    INFO = 0
    WARN = 1
    ERROR = 2


@dataclass(frozen=True)
class Alert:
    """One rule that fired at one step.

    Attributes:
        rule, level, step: which one, how bad it is, and the step of its row.
        tag, value: the diagnostic, without the ``guard/`` prefix; it may be NaN or infinite.
        limit: the nearest value at which the rule would have reported the same level.
        window: number of past observations that the limit rests on, or for which the value stayed
            out of range; 0 where the rule needs no past.
        remedies: the two likeliest that the run allows, if any;
            :class:`~ebmguard.alerts.Judge` alone, which knows no run, gives all.
        member: which model of an ensemble, along the flattened model dimensions; None for a single
            model or the ensemble as a whole.
        follows: the rule whose ERROR was going on when this trouble began; there are no remedies.
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
        past = f" over the last {self.window} steps" if self.window else ""
        where = f"step {self.step}" + ("" if self.member is None else f", member {self.member}")
        what = f"{self.tag} = {self.value:.4g} (limit {self.limit:.4g}{past})."
        help_ = f" Likeliest remedies: {'; '.join(self.remedies)}." if self.remedies else ""
        if self.follows is not None:
            help_ = f" Follows {self.follows}."
        return f"{self.level.name} {self.rule} at {where}: {what}{help_}"

    def record(self) -> dict[str, Any]:
        """The alert as a plain dict with its message; without ``member`` or ``follows`` if None."""
        record = asdict(self) | {"level": self.level.name, "remedies": [*map(str, self.remedies)]}
        known = {name: value for name, value in record.items() if value is not None}
        return known | {"message": self.message}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Alert:
        """The inverse of :meth:`record`; a ``ConfigError`` of what is no record of an alert."""
        try:
            optional = {"member", "follows"} - {name for name in record if record[name] is not None}
            read = {name: _READ[name](record[name]) for name in _READ if name not in optional}
            if isinstance(record["remedies"], str) or len(read["remedies"]) > 2:
                raise ValueError("expected a list of two remedies or fewer")
            return cls(**read)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"This is not the record of an alert: {type(error).__name__}: {error}. Expected "
                f"what Alert.record() or sinks.read_jsonl returns, but got {dict(record)!r}."
            ) from error


_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("rule", "tag", "follows"), str),
    **dict.fromkeys(("step", "window", "member"), int),
    **dict.fromkeys(("value", "limit"), float),
    "level": Level.__getitem__,
    "remedies": lambda remedies: tuple(map(str, remedies)),
}
