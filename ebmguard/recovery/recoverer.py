"""The stateful part of recovery: takes snapshots, certifies them, and takes the run back."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..alerts import Alert, Level, Situation
from ..alerts.remedies import contradict
from ..errors import BudgetSpentError, ConfigError, Stateful
from ..ranks import Ranks
from ..tags import BETA_STAR, GRAD_SCALE
from ..trainer import Trainer
from .archive import Archive
from .changes import LearningRate, purge, rates, reseed
from .policy import BY_CAUSE, FALLBACK, Change, Recovery, Rollback
from .snapshots import Snapshot, Snapshots
from .state import buffer_rows, capture, check_complete, generators_of, restore

__all__ = ["Recoverer"]

_log = logging.getLogger("ebmguard")

# Rules of a run that is being lost. What others tell of may last, and such a run needs snapshots.
_UNSETTLING = ("nonfinite", "energy_blowup", "collapsed", "sampler_failing")

# Medians of GradScale over so many steps before a snapshot, and over those that certify it, from
# which on it counts as good: that at which the rule ``sampler_failing`` is calm.
_STEPS_BEFORE = 20
_SETTLED = 0.2


class Recoverer(Stateful):
    """Keeps snapshots of a run, and takes the run back; see :class:`Recovery` for the policy.

    A rollback is :meth:`restore`, then, once the caller has loaded its own part, :meth:`change`.
    Each rank takes its own part back, and all decide the same.

    Attributes:
        effect: what rollbacks have changed in the run so far.
        attempt: number of rollbacks so far, those before a resume included.
        rollbacks: the audit log.
    """

    _owner = "a recovery"

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
        self._tried: list[tuple[str, bool]] = []  # remedies, and whether an alert named them
        # The steps of the last rollback's snapshot and of its ERROR.
        self._restored: int | None = None
        self._broke = 0
        self._forget()
        self._has_begun = False
        self._rate = LearningRate()

    def _forget(self) -> None:
        self._snapshots = Snapshots(self.settings.keep, self.settings.certify_after)
        self._forget_scales()

    def _forget_scales(self) -> None:
        self._before = deque[float](maxlen=_STEPS_BEFORE)
        self._since = deque[float](maxlen=self.settings.certify_after)

    def read(self, row: Mapping[str, float]) -> None:
        """Take the row of a step that is over: GradScale says whether negatives compete."""
        value = row.get(GRAD_SCALE, math.nan)
        if row.get(BETA_STAR, math.nan) == 0:
            self._forget_scales()  # the weights say nothing
        elif math.isfinite(value):
            self._before.append(value)
            self._since.append(value)

    def watch(self, optimizer: Optimizer) -> None:
        """Scale this optimizer's rate in its ``step``; call it before hooks that act after it."""
        self._rate.watch(optimizer)
        self._rate.factor = self.effect.lr

    def observe(self, step: int, judged: int, active: Mapping[str, Level]) -> bool:
        """Certify what has been quiet before ``judged``; say whether one is due before ``step``.

        ``active`` is that of the judge.
        """
        settings, snapshots = self.settings, self._snapshots
        if any(
            level >= Level.ERROR or (rule in _UNSETTLING and level >= Level.WARN)
            for rule, level in active.items()
        ):
            snapshots.disquiet(judged - 1)
            return False
        for ripe in snapshots.certify(judged, settled=_is_settled(self._since)):
            if self._archive is not None and self._archive.is_due(ripe.step):
                self._archive.write(ripe.step, ripe.state, self.state_dict())
        return step % settings.every == 0 or not (snapshots.certified or snapshots.waiting)

    def keep(self, step: int, trainer: Trainer, guard_state: Any) -> None:
        """Take a snapshot of what is attached and of the guard's own part, before ``step``."""
        state = capture(trainer, guard_state, self._snapshots.spare())
        settled = _is_settled(self._before)
        self._snapshots.waiting.append(Snapshot(step, state, settled=settled))

    def restore(self, step: int, trainer: Trainer, error: Alert) -> tuple[Rollback, Any]:
        """Put the run back; return the first half of a rollback, and the guard's own part.

        Raises:
            BudgetSpentError: no rollback is left, or there is no snapshot to go back to.
            ConfigError: something was attached after the snapshot was taken.
        """
        settings, snapshots = self.settings, self._snapshots
        if self.attempt >= settings.budget:
            raise BudgetSpentError(error, self.attempt)
        snapshots.disquiet(error.step)
        relapse, condemned = False, tuple[int, ...]()
        if (last := self._restored) is not None:
            took, held = self._broke - last, error.step - last
            relapse = held <= max(settings.relapse_within, 2 * took)
            if held <= max(settings.relapse_within, took):  # it has not come farther
                condemned = snapshots.condemn(last)
        snapshot = snapshots.best()
        if snapshot is None:
            raise BudgetSpentError(error, self.attempt, nothing_to_go_back_to=True)
        restore(trainer, snapshot.state)
        snapshots.restart_from(snapshot)
        self.attempt += 1
        self._restored, self._broke = snapshot.step, error.step
        self._forget_scales()
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
        return rollback, snapshot.state["guard"]

    def change(
        self, rollback: Rollback, trainer: Trainer, now: Situation, *, knows_steps: bool
    ) -> Rollback:
        """Change the run that was put back, so that it does not take the same course again."""
        changes: dict[str, tuple[float, float]] = {}
        usual, own_rates = trainer.sgld_steps if knows_steps else None, rates(trainer.optimizer)
        for change in self._rungs(rollback.alert):
            changes, self.effect = self._applied(change, now, usual, own_rates)
            if changes or change == Change():
                break
        self._rate.factor = self.effect.lr
        reseeded = reseed(self.attempt, generators_of(trainer)) if self.settings.reseed else 0
        rows, purged = buffer_rows(trainer), 0
        if self.settings.purge and rows is not None:
            classes = getattr(trainer.buffer, "classes", 1)
            purged = purge(rows, torch.Generator().manual_seed(self.attempt), classes)
        purged = sum(self._ranks.from_all(purged))
        rollback = replace(rollback, changes=changes, reseeded=reseeded, purged_rows=purged)
        self.rollbacks.append(rollback)
        if self._ranks.is_first:
            _log.warning(rollback.message)
        return rollback

    def _rungs(self, alert: Alert) -> Iterator[Change]:
        """The changes to try in turn, until one changes something here."""
        ladder = self.settings.ladder
        if ladder is not None:
            first = min(self._rung, len(ladder) - 1)
            for change in ladder[first:]:
                self._rung += 1
                yield change
            return
        causes = sorted({*BY_CAUSE} & {*alert.remedies}, key=alert.remedies.index)
        order = [*causes, *(remedy for remedy in FALLBACK if remedy not in causes)]
        for remedy in sorted(order, key=[tried for tried, _ in self._tried].count):
            named = remedy in causes  # it may undo what no alert has named
            before = [other for other, was_named in self._tried if was_named or not named]
            if not any(contradict(remedy, other) for other in (*causes, *before)):
                self._tried.append((str(remedy), named))
                yield BY_CAUSE[remedy]
                self._tried.pop()  # it changed nothing

    def _applied(
        self, change: Change, now: Situation, usual: int | None, own_rates: list[float]
    ) -> tuple[dict[str, tuple[float, float]], Change]:
        """What a change does to the run, in values before and after, and all changes with it."""
        found: dict[str, tuple[float, float]] = {}
        before, star, effect = self.effect, now.beta_star, self.effect
        if change.beta_factor != 1 and math.isfinite(star):
            star = max(star * change.beta_factor, now.least)
            effect = replace(
                effect,
                beta_star=before.beta_star and before.beta_star * change.beta_factor,
                beta_factor=before.beta_factor * change.beta_factor,
            )
        if change.beta_star is not None:
            raised = min(change.beta_star, now.most)
            # Never to the other side of 0, where all is reversed.
            if star < raised and star * raised >= 0:
                star = raised
                effect = replace(effect, beta_star=raised)
        if math.isfinite(star) and star != now.beta_star:
            found["beta_star"] = (now.beta_star, star)
        if usual is not None:
            factors = before.sgld_steps, before.sgld_steps * change.sgld_steps
            old, new = (max(1, round(usual * factor)) for factor in factors)
            if new != old:
                found["sgld_steps"] = (float(old), float(new))
                effect = replace(effect, sgld_steps=factors[1])
        if change.lr != 1 and own_rates:
            name = "lr" if len(set(own_rates)) == 1 else "largest_lr"
            found[name] = (max(own_rates) * before.lr, max(own_rates) * before.lr * change.lr)
            effect = replace(effect, lr=before.lr * change.lr)
        return found, effect if found else before

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
            ConfigError: none of them can be read, or no ``folder`` was given.
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

    def _saved(self) -> dict[str, Any]:
        counts = {"attempt": int, "_rung": int, "_restored": int | None, "_broke": int}
        return counts | {"_tried": list[tuple[str, bool]], "effect": Change}

    def _take(self, read: Mapping[str, Any]) -> None:
        super()._take(read)
        self._rate.factor = self.effect.lr
        self._forget()
        self._has_begun = True
        if self._archive is not None:
            self._archive.saved = None


def _is_settled(scales: Collection[float]) -> bool:
    """Whether GradScale was healthy, or is unknown."""
    return not scales or statistics.median(scales) >= _SETTLED
