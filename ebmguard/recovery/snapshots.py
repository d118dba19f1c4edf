"""The snapshots of a run: which are certified, which are kept, which is used next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Snapshot", "Snapshots"]


@dataclass(eq=False)  # its tensors have no single truth value
class Snapshot:
    """A run's whole state between two steps, as :func:`.state.capture` returned it."""

    step: int  # the one that comes next
    state: dict[str, Any]
    certified: bool = False  # followed by enough quiet steps
    settled: bool = True  # GradScale was healthy before it


@dataclass(eq=False)
class Snapshots:
    """``keep`` certified snapshots in ages that grow by factors, and those that ``certify_after``
    quiet steps make so; the oldest first."""

    keep: int
    certify_after: int
    certified: list[Snapshot] = field(default_factory=list)
    waiting: list[Snapshot] = field(default_factory=list)
    _spare: dict[str, Any] | None = None

    def spare(self) -> dict[str, Any] | None:
        """A state whose memory may be used again."""
        state, self._spare = self._spare, None
        return state

    def disquiet(self, quiet_until: int) -> None:
        """Drop what was taken less than ``certify_after`` steps before an alert's step."""
        # The first one stays as the last resort: there is nothing deeper.
        kept = self._ripe(quiet_until) or int(not self.certified)
        for dropped in self.waiting[kept:]:
            self._spare = dropped.state
        del self.waiting[kept:]

    def certify(self, step: int, *, settled: bool = True) -> list[Snapshot]:
        """Certify what has been quiet for long enough by ``step``; return the new ones.

        Those are dropped before which, or after which (``settled``), GradScale was too low.
        """
        count = self._ripe(step)
        ripe = [each for each in self.waiting[:count] if settled and each.settled]
        # The first one stays as the last resort here too.
        last_resort = self.waiting[: int(not (ripe or self.certified) and count > 0)]
        for each in self.waiting[:count]:
            if each not in (*ripe, *last_resort):
                self._spare = each.state
        self.waiting = last_resort + self.waiting[count:]
        for each in ripe:
            each.certified = True
            self.certified.append(each)
            if len(self.certified) > self.keep:
                self._spare = self.certified.pop(self._superfluous(step)).state
        return ripe

    def best(self) -> Snapshot | None:
        """The newest certified one; without any, the oldest that there is."""
        return self.certified[-1] if self.certified else next(iter(self.waiting), None)

    def condemn(self, step: int) -> tuple[int, ...]:
        """Drop the snapshots from ``step`` on, but for the oldest of all; return their steps."""
        kept = sum(each.step < step for each in self.certified) or 1
        condemned = self.certified[kept:]
        del self.certified[kept:]
        return tuple(each.step for each in condemned)

    def restart_from(self, snapshot: Snapshot) -> None:
        """Forget what came after a snapshot that was restored."""
        self.certified = [each for each in self.certified if each.step <= snapshot.step]
        self.waiting = [] if snapshot.certified else [snapshot]

    def _ripe(self, step: int) -> int:
        """How many of the waiting ones, the oldest, are old enough by ``step``."""
        return sum(each.step + self.certify_after <= step for each in self.waiting)

    def _superfluous(self, step: int) -> int:
        """Of the inner ones, that whose neighbours are nearest to each other for their age."""
        if len(self.certified) < 3:
            return 0
        steps = [each.step for each in self.certified]
        inner = range(1, len(steps) - 1)
        return min(inner, key=lambda i: (steps[i + 1] - steps[i - 1]) / (step + 1 - steps[i - 1]))
