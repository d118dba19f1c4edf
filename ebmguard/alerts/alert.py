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
        remedies: the two likeliest remedies, likeliest first.
        member: which model of an ensemble, counted along the flattened model dimensions from 0;
            None where the alert is of a single model or of the ensemble as a whole.
    """

    rule: str
    level: Level
    step: int
    tag: str
    value: float
    limit: float
    window: int
    remedies: tuple[str, str]
    member: int | None = None

    @property
    def message(self) -> str:
        """The alert in words."""
        past = f" over the last {self.window} steps" if self.window else ""
        where = f"step {self.step}" + ("" if self.member is None else f", member {self.member}")
        return (
            f"{self.level.name} {self.rule} at {where}: {self.tag} = {self.value:.4g} "
            f"(limit {self.limit:.4g}{past}). "
            f"Likeliest remedies: {self.remedies[0]}; {self.remedies[1]}."
        )

    def record(self) -> dict[str, Any]:
        """The alert as a plain dict with its message; ``member`` is there for members only.

        ``value`` and ``limit`` stay floats, which JSON may lack a number for: see the sinks.
        """
        record = asdict(self) | {"level": self.level.name, "remedies": list(self.remedies)}
        if self.member is None:
            del record["member"]
        return record | {"message": self.message}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Alert:
        """The inverse of :meth:`record`.

        Raises:
            ConfigError: if a field is missing or has a value that no alert has.
        """
        try:
            first, second = record["remedies"]
            member = record.get("member")
            return cls(
                rule=str(record["rule"]),
                level=Level[record["level"]],
                step=int(record["step"]),
                tag=str(record["tag"]),
                value=float(record["value"]),
                limit=float(record["limit"]),
                window=int(record["window"]),
                remedies=(str(first), str(second)),
                member=None if member is None else int(member),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"This is not the record of an alert: {type(error).__name__}: {error}. Expected "
                f"what Alert.record() or sinks.read_jsonl returns, but got {dict(record)!r}."
            ) from error
