"""The stateful part of recovery: takes snapshots, certifies them, and takes the run back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..alerts import Alert, Level
from ..errors import BudgetSpentError, ConfigError
from ..ranks import Ranks
from ..trainer import Trainer
from .archive import Archive
from .learning_rate import LearningRate
from .policy import Change, Recovery
from .purge import purge
from .randomness import reseed
from .rollback import Rollback
from .snapshots import Snapshot, Snapshots
from .state import buffer_rows, capture, check_complete, generators_of, restore

__all__ = ["Effect", "Recoverer", "Restored"]

_log = logging.getLogger("ebmguard")

# Rules that speak of a blow-up under way. The others are about states that may last, in which a run
# would never have a snapshot.
_UNSETTLING = ("nonfinite", "energy_blowup")


@dataclass(frozen=True)
class Effect:
    """What rollbacks have changed in the run so far.

    Attributes:
        beta_star: β* instead of the run's own, or None.
        sgld_steps: factor on the number of SGLD steps.
        lr: factor on the learning rate.
    """

    beta_star: float | None = None
    sgld_steps: float = 1.0
    lr: float = 1.0

    def then(
        self, change: Change, beta_star: float | None, knows_steps: bool
    ) -> tuple[Effect, dict[str, tuple[float, float]]]:
        """This and a further change.

        Args:
            change: what the ladder asks for.
            beta_star: β* as it is now; None where it is no single number, and stays.
            knows_steps: whether the guard can change the number of SGLD steps.

        Returns:
            the new effect, and what differs: name to the values before and after.
        """
        new = self
        found: dict[str, tuple[float, float]] = {}
        if _is_raised(beta_star, change.beta_star):
            assert beta_star is not None
            assert change.beta_star is not None
            new = replace(new, beta_star=change.beta_star)
            found["beta_star"] = (beta_star, change.beta_star)
        if change.sgld_steps != 1 and knows_steps:
            new = replace(new, sgld_steps=self.sgld_steps * change.sgld_steps)
            found["sgld_steps"] = (self.sgld_steps, new.sgld_steps)
        if change.lr != 1:
            new = replace(new, lr=self.lr * change.lr)
            found["lr"] = (self.lr, new.lr)
        return new, found


def _is_raised(beta_star: float | None, to: float | None) -> bool:
    """Whether a change raises β*; none takes it to the other side of 0, where all is reversed."""
    return beta_star is not None and to is not None and beta_star < to and beta_star * to >= 0


@dataclass(frozen=True, eq=False)
class Restored:
    """The first half of a rollback.

    Attributes:
        error: why.
        step: the step at whose end it happened.
        snapshot: what the run was put back to.
        relapse: whether the previous restore had not held.
        condemned: steps of the snapshots that were given up for it.
    """

    error: Alert
    step: int
    snapshot: Snapshot
    relapse: bool
    condemned: tuple[int, ...]

    @property
    def guard_state(self) -> Any:
        """The guard's own part of the snapshot."""
        return self.snapshot.state["guard"]


class Recoverer:
    """Keeps snapshots of a run, and takes the run back; see :class:`Recovery` for the policy.

    A rollback has two halves, since what a change starts from is known only when the caller has
    loaded its own part: :meth:`restore`, then :meth:`change`. Ranks that are told the same decide
    the same: each takes its own part of the run back.

    Args:
        settings: the policy.
        ranks: the ranks that train together.

    Attributes:
        effect: what has been changed so far.
        attempt: number of rollbacks so far, those before a resume included.
        rollbacks: the audit log.
    """

    def __init__(self, settings: Recovery, ranks: Ranks) -> None:
        self.settings = settings
        self._ranks = ranks
        self._archive: Archive | None = None
        if settings.folder is not None:
            self._archive = Archive(Path(settings.folder), settings.folder_every, ranks)
        self.effect = Effect()
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
        """Scale this optimizer's learning rate from now on, inside its ``step``.

        Call it before hooks that look at the optimizer after its step.
        """
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
        """Take a snapshot.

        Args:
            step: the step that comes next.
            trainer: what was attached.
            guard_state: of the guard's own part.
        """
        state = capture(trainer, guard_state, self._snapshots.spare())
        self._snapshots.add(Snapshot(step, state))

    def restore(self, step: int, trainer: Trainer, error: Alert) -> Restored:
        """Put the run back to the newest snapshot that is to be trusted.

        Args:
            step: the step that would come next.
            trainer: what was attached.
            error: why.

        Returns:
            the snapshot, whose own part the guard loads before it asks for :meth:`change`.

        Raises:
            BudgetSpentError: no rollback is left, or there is no snapshot to go back to.
        """
        settings, snapshots = self.settings, self._snapshots
        if self.attempt >= settings.budget:
            raise BudgetSpentError(error, self.attempt)
        snapshots.disquiet(error.step)
        relapse = self._restored is not None and step - self._restored <= settings.relapse_within
        before = len(snapshots.condemned)
        if relapse and self._restored is not None:
            snapshots.condemn(self._restored)
        snapshot = snapshots.best()
        if snapshot is None:
            raise BudgetSpentError(error, self.attempt, nothing_to_go_back_to=True)
        self.attempt += 1
        restore(trainer, snapshot.state)
        snapshots.restart_from(snapshot)
        self._restored = snapshot.step
        return Restored(error, step - 1, snapshot, relapse, tuple(snapshots.condemned[before:]))

    def change(
        self, restored: Restored, trainer: Trainer, beta_star: float | None, *, knows_steps: bool
    ) -> Rollback:
        """Change the run that was put back, so that it does not take the same course again.

        Args:
            restored: what :meth:`restore` returned.
            trainer: what was attached.
            beta_star: β* of the step that comes next; None where it is no single number.
            knows_steps: whether the guard can change the number of SGLD steps.

        Returns:
            what was done, for the audit log.
        """
        settings = self.settings
        self.effect, changes = self._next_effect(beta_star, knows_steps)
        self._rate.factor = self.effect.lr
        reseeded = reseed(self.attempt, generators_of(trainer)) if settings.reseed else 0
        rows, purged = buffer_rows(trainer), 0
        if settings.purge and rows is not None:
            classes = getattr(trainer.buffer, "classes", 1)
            purged = purge(rows, torch.Generator().manual_seed(self.attempt), classes)
        rollback = Rollback(
            alert=restored.error,
            step=restored.step,
            restored_step=restored.snapshot.step,
            attempt=self.attempt,
            certified=restored.snapshot.certified,
            relapse=restored.relapse,
            condemned=restored.condemned,
            changes=changes,
            reseeded=reseeded,
            purged_rows=sum(self._ranks.from_all(purged)),
            budget_left=settings.budget - self.attempt,
        )
        self.rollbacks.append(rollback)
        if self._ranks.is_first:
            _log.warning(rollback.message)
        return rollback

    def _next_effect(
        self, beta_star: float | None, knows_steps: bool
    ) -> tuple[Effect, dict[str, tuple[float, float]]]:
        """Climb to the next rung that changes something here, or is meant to change nothing."""
        ladder = self.settings.ladder
        while True:
            change = ladder[min(self._rung, len(ladder) - 1)]
            effect, found = self.effect.then(change, beta_star, knows_steps)
            self._rung += 1
            if found or change == Change() or self._rung >= len(ladder):
                return effect, found

    def save_restored(self, trainer: Trainer, guard_state: Any) -> None:
        """Write the run as a rollback has left it, where snapshots are written at all.

        Else a process that dies soon would go on from a snapshot that was given up, without the
        changes, and with a budget that is not spent.

        Args: as of :meth:`keep`.
        """
        if self._archive is not None and self._restored is not None:
            state = capture(trainer, guard_state)
            self._archive.write(self._restored, state, self.state_dict())

    def check_ready(self, trainer: Trainer) -> None:
        """Refuse to begin a run that could not be taken back, or one over another's snapshots.

        Raises:
            ConfigError: with what to do.
        """
        check_complete(trainer)
        if self._archive is not None and not self._has_begun:
            self._archive.check_empty()
            self._has_begun = True

    def resume(self, trainer: Trainer) -> Snapshot | None:
        """Put the run back to the newest snapshot on the disk that all ranks can read.

        Returns:
            the snapshot, whose own part the guard loads; None where there is none.

        Raises:
            ConfigError: there are snapshots, and none can be read; or no ``folder`` was given.
        """
        if self._archive is None:
            raise ConfigError(
                "There is no folder to resume from: pass recovery=Recovery(folder=...)."
            )
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
        self.effect = Effect(state["beta_star"], float(state["sgld_steps"]), float(state["lr"]))
        self._rate.factor = self.effect.lr
        self._snapshots = Snapshots(self.settings.keep, self.settings.certify_after)
        self._has_begun = True
        if self._archive is not None:
            self._archive.saved = None
