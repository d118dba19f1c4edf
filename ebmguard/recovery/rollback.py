"""A rollback as data, and in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..alerts import Alert

__all__ = ["Rollback"]


@dataclass(frozen=True)
class Rollback:
    """One line of the audit log.

    Attributes:
        alert: why.
        step: the step at whose end it happened.
        restored_step: the step that comes next.
        attempt: how many rollbacks there were, with this one.
        certified: whether the snapshot was; only the first of a run may not be.
        relapse: whether the previous restore had not held.
        condemned: steps of the snapshots that were given up for it.
        changes: name to values before and after.
        reseeded: number of random generators that were.
        purged_rows: rows of the replay buffer that were replaced.
        budget_left: further rollbacks before the run ends.
    """

    alert: Alert
    step: int
    restored_step: int
    attempt: int
    certified: bool
    relapse: bool
    condemned: tuple[int, ...]
    changes: dict[str, tuple[float, float]]
    reseeded: int
    purged_rows: int
    budget_left: int

    @property
    def message(self) -> str:
        """The rollback in words."""
        why = f"{self.alert.rule} ({self.alert.tag} = {self.alert.value:.4g})"
        again = ", a relapse" if self.relapse else ""
        changed = [
            f"{name} {before:g} -> {after:g}" for name, (before, after) in self.changes.items()
        ]
        changed += ["new random numbers"] if self.reseeded else []
        changed += [f"{self.purged_rows} buffer rows replaced"] if self.purged_rows else []
        kind = "" if self.certified else "uncertified "
        return (
            f"Rollback {self.attempt} at step {self.step}{again}: {why}. Back to the "
            f"{kind}snapshot of step {self.restored_step}, with "
            f"{', '.join(changed) or 'nothing changed'}. {self.budget_left} left."
        )

    def record(self) -> dict[str, Any]:
        """The rollback as a plain dict with its message, ready for JSON."""
        return {
            "step": self.step,
            "restored_step": self.restored_step,
            "attempt": self.attempt,
            "rule": self.alert.rule,
            "tag": self.alert.tag,
            "value": self.alert.value,
            "certified": self.certified,
            "relapse": self.relapse,
            "condemned": list(self.condemned),
            "changes": {name: list(pair) for name, pair in self.changes.items()},
            "reseeded": self.reseeded,
            "purged_rows": self.purged_rows,
            "budget_left": self.budget_left,
            "message": self.message,
        }
