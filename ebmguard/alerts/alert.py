"""An alert is data: what fired, where, by how much, and what usually helps."""

from __future__ import annotations

from collections.abc import Mapping
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
        rule: name of the rule, for example ``"energy_blowup"``.
        level: how bad it is.
        step: step of the row that fired.
        tag: the diagnostic that fired, without the ``guard/`` prefix.
        value: its value at that step, in the units of the diagnostic. May be NaN or infinite.
        limit: the nearest value at which the rule would have reported the same level.
        window: number of past observations that the limit rests on, or for which the value stayed
            out of range; 0 where the rule needs no past.
        remedies: the two likeliest remedies that the run allows, likeliest first; there may be one
            or none. :class:`~ebmguard.alerts.Judge` alone, which knows no run, gives all.
        member: which model of an ensemble, counted along the flattened model dimensions from 0;
            None where the alert is of a single model or of the ensemble as a whole.
        follows: the rule whose ERROR was going on when this trouble began; such an alert has no
            remedies of its own.
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
        """The alert as a plain dict with its message; without ``member`` or ``follows`` if None.

        ``value`` and ``limit`` stay floats, which JSON may lack a number for: see the sinks.
        """
        record = asdict(self) | {"level": self.level.name, "remedies": [*map(str, self.remedies)]}
        for name in ("member", "follows"):
            if record[name] is None:
                del record[name]
        return record | {"message": self.message}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Alert:
        """The inverse of :meth:`record`.

        Raises:
            ConfigError: if a field is missing or has a value that no alert has.
        """
        try:
            remedies = record["remedies"]
            if isinstance(remedies, str) or len(remedies) > 2:
                raise ValueError(f"remedies={remedies!r}; expected a list of two or fewer")
            member, follows = record.get("member"), record.get("follows")
            return cls(
                rule=str(record["rule"]),
                level=Level[record["level"]],
                step=int(record["step"]),
                tag=str(record["tag"]),
                value=float(record["value"]),
                limit=float(record["limit"]),
                window=int(record["window"]),
                remedies=tuple(map(str, remedies)),
                member=None if member is None else int(member),
                follows=None if follows is None else str(follows),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"This is not the record of an alert: {type(error).__name__}: {error}. Expected "
                f"what Alert.record() or sinks.read_jsonl returns, but got {dict(record)!r}."
            ) from error
