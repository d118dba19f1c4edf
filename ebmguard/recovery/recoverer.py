"""The stateful part of recovery: takes snapshots, certifies them, and takes the run back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..alerts import Alert, Level
from ..errors import BudgetSpentError, ConfigError
from ..ranks import Ranks
from ..trainer import Trainer
from .archive import Archive
from .changes import LearningRate, purge, reseed
from .policy import Change, Recovery, Rollback
from .snapshots import Snapshot, Snapshots
from .state import buffer_rows, capture, check_complete, generators_of, restore

__all__ = ["Recoverer", "Restored"]

_log = logging.getLogger("ebmguard")

# Rules of a blow-up under way. The states of others may last, and a run in them needs snapshots.
_UNSETTLING = ("nonfinite", "energy_blowup")


class Restored(NamedTuple):
    """The first half of a rollback, and the guard's own part of the snapshot that was used."""

    rollback: Rollback
    guard_state: Any


class Recoverer:
    """Keeps snapshots of a run, and takes the run back; see :class:`Recovery` for the policy.

    A rollback has two halves, since what a change starts from is known only when the caller has
    loaded its own part: :meth:`restore`, then :meth:`change`. Ranks that are told the same decide
    the same: each takes its own part of the run back.

    Attributes:
        effect: what rollbacks have changed in the run so far.
        attempt: number of rollbacks so far, those before a resume included.
        rollbacks: the audit log.
    """

    def __init__(self, settings: Recovery, ranks: Ranks) -> None:
        self.settings = settings
        self._ranks = ranks
        self._archive: Archive | None = None
        if settings.folder is not None:
            self._archive = Archive(Path(settings.folder), settings.folder_every, ranks)
        self.effect = Change()
        self.attempt = 0
        self.rollbacks: list[Rollback] = []
        self._rung = 0
        self._restored: int | None = None
        self._snapshots = Snapshots(settings.keep, settings.certify_after)
        self._has_begun = False
        self._rate = LearningRate()

    @property
    def snapshot_steps(self) -> list[int]:
        """Steps of the certified snapshots in memory, oldest first."""
        return [each.step for each in self._snapshots.certified]

    def watch(self, optimizer: Optimizer) -> None:
        """Scale this optimizer's rate in its ``step``; call it before hooks that act after it."""
        self._rate.watch(optimizer)
        self._rate.factor = self.effect.lr

    def observe(self, step: int, judged: int, active: Mapping[str, Level]) -> bool:
        """Certify what has been quiet for long enough; say whether a snapshot is due.

        Args:
            step: the step that comes next.
            judged: the step before which all rows have been judged.
            active: the rules whose episode is not over, with the highest level of each.
        """
        settings, snapshots = self.settings, self._snapshots
        if any(
            level >= Level.ERROR or (rule in _UNSETTLING and level >= Level.WARN)
            for rule, level in active.items()
        ):
            snapshots.disquiet(judged - 1)
            return False
        for ripe in snapshots.certify(judged):
            if self._archive is not None and self._archive.is_due(ripe.step):
                self._archive.write(ripe.step, ripe.state, self.state_dict())
        return step % settings.every == 0 or not (snapshots.certified or snapshots.waiting)

    def keep(self, step: int, trainer: Trainer, guard_state: Any) -> None:
        """Take a snapshot of what is attached and of the guard's own part, before ``step``."""
        state = capture(trainer, guard_state, self._snapshots.spare())
        self._snapshots.waiting.append(Snapshot(step, state))

    def restore(self, step: int, trainer: Trainer, error: Alert) -> Restored:
        """Put the run back to the newest snapshot that is to be trusted.

        Args:
            step: the step that would come next.
            trainer: what was attached.
            error: why.

        Raises:
            BudgetSpentError: no rollback is left, or there is no snapshot to go back to.
            ConfigError: something was attached after the snapshot was taken.
        """
        settings, snapshots = self.settings, self._snapshots
        if self.attempt >= settings.budget:
            raise BudgetSpentError(error, self.attempt)
        snapshots.disquiet(error.step)
        last = self._restored
        relapse = last is not None and step - last <= settings.relapse_within
        condemned = snapshots.condemn(last) if last is not None and relapse else ()
        snapshot = snapshots.best()
        if snapshot is None:
            raise BudgetSpentError(error, self.attempt, nothing_to_go_back_to=True)
        restore(trainer, snapshot.state)
        snapshots.restart_from(snapshot)
        self.attempt += 1
        self._restored = snapshot.step
        rollback = Rollback(
            alert=error,
            step=step - 1,
            restored_step=snapshot.step,
            attempt=self.attempt,
            certified=snapshot.certified,
            relapse=relapse,
            condemned=condemned,
            budget_left=settings.budget - self.attempt,
        )
        return Restored(rollback, snapshot.state["guard"])

    def change(
        self, restored: Restored, trainer: Trainer, beta_star: float | None, *, knows_steps: bool
    ) -> Rollback:
        """Change the run that was put back, so that it does not take the same course again.

        Args:
            restored: what :meth:`restore` returned.
            trainer: as for it.
            beta_star: β* of the step that comes next; None where it is no single number.
            knows_steps: whether the guard can change the number of SGLD steps.
        """
        settings = self.settings
        changes = self._climb(beta_star, knows_steps)
        reseeded = reseed(self.attempt, generators_of(trainer)) if settings.reseed else 0
        rows, purged = buffer_rows(trainer), 0
        if settings.purge and rows is not None:
            classes = getattr(trainer.buffer, "classes", 1)
            purged = purge(rows, torch.Generator().manual_seed(self.attempt), classes)
        rollback = replace(
            restored.rollback,
            changes=changes,
            reseeded=reseeded,
            purged_rows=sum(self._ranks.from_all(purged)),
        )
        self.rollbacks.append(rollback)
        if self._ranks.is_first:
            _log.warning(rollback.message)
        return rollback

    def _climb(self, beta_star: float | None, knows_steps: bool) -> dict[str, tuple[float, float]]:
        """Apply the next rung that changes something here, or is meant to change nothing."""
        ladder, now = self.settings.ladder, self.effect
        while True:
            change = ladder[min(self._rung, len(ladder) - 1)]
            self._rung += 1
            found: dict[str, tuple[float, float]] = {}
            to = change.beta_star
            # Raised, but never to the other side of 0, where all is reversed.
            if beta_star is not None and to is not None and beta_star < to and beta_star * to >= 0:
                found["beta_star"] = (beta_star, to)
            if change.sgld_steps != 1 and knows_steps:
                found["sgld_steps"] = (now.sgld_steps, now.sgld_steps * change.sgld_steps)
            if change.lr != 1:
                found["lr"] = (now.lr, now.lr * change.lr)
            if found or change == Change() or self._rung >= len(ladder):
                self.effect = replace(now, **{name: after for name, (_, after) in found.items()})
                self._rate.factor = self.effect.lr
                return found

    def save_restored(self, trainer: Trainer, guard_state: Any) -> None:
        """Write the run as a rollback has left it, for a process that dies soon after."""
        if self._archive is not None and self._restored is not None:
            state = capture(trainer, guard_state)
            self._archive.write(self._restored, state, self.state_dict())

    def check_ready(self, trainer: Trainer) -> None:
        """Refuse to begin a run that could not be taken back, or one over another's snapshots."""
        check_complete(trainer)
        if self._archive is not None and not self._has_begun:
            self._archive.check_empty()
            self._has_begun = True

    def resume(self, trainer: Trainer) -> Snapshot | None:
        """Put the run back to the newest snapshot on the disk that all ranks can read, if any.

        Raises:
            ConfigError: there are snapshots, and none can be read; or no ``folder`` was given.
        """
        if self._archive is None:
            raise ConfigError("No folder to resume from: pass recovery=Recovery(folder=...).")
        check_complete(trainer)
        found = self._archive.newest()
        if found is None:
            return None
        snapshot = Snapshot(int(found["step"]), found["state"], certified=True)
        restore(trainer, snapshot.state)
        self.load_state_dict(found["recovery"])
        self._archive.saved = snapshot.step
        self._snapshots.certified = [snapshot]
        return snapshot

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain values. Snapshots in memory are not part of it."""
        return {
            "attempt": self.attempt,
            "rung": self._rung,
            "restored": self._restored,
            **vars(self.effect),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.attempt, self._rung = int(state["attempt"]), int(state["rung"])
        self._restored = state["restored"]
        self.effect = Change(state["beta_star"], float(state["sgld_steps"]), float(state["lr"]))
        self._rate.factor = self.effect.lr
        self._snapshots = Snapshots(self.settings.keep, self.settings.certify_after)
        self._has_begun = True
        if self._archive is not None:
            self._archive.saved = None
