"""The stateful part of recovery: takes snapshots, certifies them, and takes the run back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..alerts import Alert, Level
from ..errors import BudgetSpentError, ConfigError
from ..ranks import Ranks
from .archive import Archive
from .learning_rate import LearningRate
from .policy import Change, Recovery
from .purge import purge
from .randomness import reseed
from .rollback import Rollback
from .snapshots import Snapshot, Snapshots
from .state import Run, buffer_rows, capture, check_run, generators_of, restore

__all__ = ["Effect", "Recoverer"]

_log = logging.getLogger("ebmguard")

# Rules that speak of a blow-up under way. The others are about states that may last, in which a run
# would never have a snapshot.
_UNSETTLING = ("nonfinite", "energy_blowup")


@dataclass(frozen=True)
class Effect:
    """What rollbacks have changed in the run so far.

    Attributes:
        beta_star: β* in the place of the run's own, or None.
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


class Recoverer:
    """Watches the end of every step; see :class:`Recovery` for what it does.

    Ranks that are told the same decide the same: each takes its own part of the run back.

    Args:
        settings: the policy.
        process_group: the ranks that train together.

    Attributes:
        effect: what has been changed so far.
        rollbacks: the audit log.
    """

    def __init__(self, settings: Recovery, process_group: dist.ProcessGroup | None = None) -> None:
        self.settings = settings
        self._ranks = Ranks(process_group)
        self._archive: Archive | None = None
        if settings.folder is not None:
            self._archive = Archive(Path(settings.folder), settings.folder_every, self._ranks)
        self.effect = Effect()
        self.rollbacks: list[Rollback] = []
        self._attempt = 0
        self._rung = 0
        self._restored: int | None = None
        self._snapshots = Snapshots(settings.keep, settings.certify_after)
        self._has_begun = False
        self._rate = LearningRate()

    @property
    def attempt(self) -> int:
        """Number of rollbacks so far, those before a resume included."""
        return self._attempt

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

    def after_step(
        self,
        step: int,
        run: Run,
        *,
        judged: int,
        error: Alert | None,
        active: Mapping[str, Level],
        beta_star: Callable[[], float | None],
        knows_steps: bool,
        guard_state: Callable[[], Any],
        load_guard_state: Callable[[Any], None],
    ) -> Rollback | None:
        """Take a snapshot, or take the run back.

        Args:
            step: the step that comes next.
            run: what was attached.
            judged: the step before which all rows have been judged.
            error: an alert that asks for a rollback.
            active: the rules whose episode is not over.
            beta_star: asked for its value at the present step of the guard, which a rollback has
                rewound by then; None where it is no single number.
            knows_steps: whether the guard can change the number of SGLD steps.
            guard_state, load_guard_state: of the guard's own part.

        Returns:
            what was done, where something was.

        Raises:
            BudgetSpentError: an ERROR, and no rollback is left; or no step to go back to.
        """
        if error is not None:
            return self._roll_back(step, run, error, beta_star, knows_steps, load_guard_state)
        settings, snapshots = self.settings, self._snapshots
        unsettled = [
            rule
            for rule, level in active.items()
            if level >= Level.ERROR or (rule in _UNSETTLING and level >= Level.WARN)
        ]
        if unsettled:
            snapshots.disquiet(judged - 1)
            return None
        for ripe in snapshots.certify(judged):
            if self._archive is not None and self._archive.is_due(ripe.step):
                self._archive.write(ripe.step, ripe.state, self.state_dict())
        if step % settings.every == 0 or (not snapshots.certified and not snapshots.waiting):
            state = capture(run, guard_state(), snapshots.spare())
            snapshots.add(Snapshot(step, state))
        return None

    def _roll_back(
        self,
        step: int,
        run: Run,
        error: Alert,
        beta_star: Callable[[], float | None],
        knows_steps: bool,
        load_guard_state: Callable[[Any], None],
    ) -> Rollback:
        settings, snapshots = self.settings, self._snapshots
        if self._attempt >= settings.budget:
            raise BudgetSpentError(error, self._attempt)
        snapshots.disquiet(error.step)
        relapse = self._restored is not None and step - self._restored <= settings.relapse_within
        before = len(snapshots.condemned)
        if relapse and self._restored is not None:
            snapshots.condemn(self._restored)
        snapshot = snapshots.best()
        if snapshot is None:
            raise BudgetSpentError(error, self._attempt, nothing_to_go_back_to=True)
        self._attempt += 1
        restore(run, snapshot.state)
        load_guard_state(snapshot.state["guard"])
        self.effect, changes = self._next_effect(beta_star(), knows_steps)
        self._rate.factor = self.effect.lr
        generators = generators_of(run)
        reseeded = reseed(self._attempt, generators) if settings.reseed else 0
        rows, purged = buffer_rows(run), 0
        if settings.purge and rows is not None:
            classes = getattr(run.buffer, "classes", 1)
            purged = purge(rows, torch.Generator().manual_seed(self._attempt), classes)
        purged = sum(self._ranks.from_all(purged))
        snapshots.restart_from(snapshot)
        self._restored = snapshot.step
        rollback = Rollback(
            alert=error,
            step=step - 1,
            restored_step=snapshot.step,
            attempt=self._attempt,
            certified=snapshot.certified,
            relapse=relapse,
            condemned=tuple(snapshots.condemned[before:]),
            changes=changes,
            reseeded=reseeded,
            purged_rows=purged,
            budget_left=settings.budget - self._attempt,
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

    def save_restored(self, run: Run, guard_state: Callable[[], Any]) -> None:
        """Write the run as a rollback has left it, where snapshots are written at all.

        Else a process that dies soon would go on from a snapshot that was given up, without the
        changes, and with a budget that is not spent.

        Args:
            run: what was attached.
            guard_state: of the guard's own part.
        """
        if self._archive is not None and self._restored is not None:
            state = capture(run, guard_state())
            self._archive.write(self._restored, state, self.state_dict())

    def check_folder(self) -> None:
        """Refuse to begin a run over the snapshots of another, which could go on.

        Raises:
            ConfigError: with what to do.
        """
        if self._archive is not None and not self._has_begun:
            self._archive.check_empty()
            self._has_begun = True

    def resume(self, run: Run, load_guard_state: Callable[[Any], None]) -> int | None:
        """Go on from the newest snapshot on the disk that all ranks can read.

        Returns:
            the step that comes next; None where there is no snapshot.

        Raises:
            ConfigError: there are snapshots, and none can be read; or no ``folder`` was given.
        """
        if self._archive is None:
            raise ConfigError(
                "There is no folder to resume from: pass recovery=Recovery(folder=...)."
            )
        check_run(run)
        found = self._archive.newest()
        if found is None:
            return None
        step, state = int(found["step"]), found["state"]
        restore(run, state)
        load_guard_state(state["guard"])
        self.load_state_dict(found["recovery"])
        self._archive.saved = step
        self._snapshots.certified = [Snapshot(step, state, certified=True)]
        return step

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain values. Snapshots in memory are not part of it."""
        effect = self.effect
        return {
            "attempt": self._attempt,
            "rung": self._rung,
            "restored": self._restored,
            "beta_star": effect.beta_star,
            "sgld_steps": effect.sgld_steps,
            "lr": effect.lr,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._attempt, self._rung = int(state["attempt"]), int(state["rung"])
        self._restored = state["restored"]
        self.effect = Effect(state["beta_star"], float(state["sgld_steps"]), float(state["lr"]))
        self._rate.factor = self.effect.lr
        self._snapshots = Snapshots(self.settings.keep, self.settings.certify_after)
        self._has_begun = True
        if self._archive is not None:
            self._archive.saved = None
