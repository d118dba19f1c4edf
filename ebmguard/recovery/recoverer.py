"""Takes snapshots of a run, certifies them, and takes the run back."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch.nn.parameter import is_lazy

from ..alerts import Alert, Level, Situation
from ..alerts.remedies import contradict
from ..errors import MISFITS, BudgetSpentError, ConfigError, EbmguardError, Stateful, folder_path
from ..ranks import Ranks
from ..sinks import Writer
from ..tags import BETA_STAR, ENERGY_GAP, GRAD_SCALE
from ..trainer import Trainer
from .archive import Archive, unloadable_part
from .chain_tracker import ChainTracker
from .changes import LearningRate, random_state, reseed
from .policy import BY_CAUSE, FALLBACK, Change, Recovery, Rollback
from .snapshots import (
    CONSTANT,
    Snapshot,
    Snapshots,
    capture,
    check_complete,
    check_fits,
    copied,
    generators_of,
    restore,
    restore_changed,
    structure_of,
)

__all__ = ["Recoverer"]

_log = logging.getLogger("ebmguard")
# The rules of a run that is being lost. Alerts of other rules may last: such a run needs snapshots.
_UNSETTLING = ("nonfinite", "energy_blowup", "collapsed", "sampler_failing")
# The median of GradScale over so many steps before a snapshot, and over those that certify it, must
# be as high as where the rule ``sampler_failing`` is calm.
_STEPS_BEFORE, _SETTLED = 20, 0.2
_OTHER = "Step %d: the %s changed. Earlier snapshots do not fit any more; a new one is kept."
_OTHER_NUMBERS = (
    "Step %d begins with other random numbers than it had (a new data loader, or draws after the "
    "optimizer's step): its batch may be another. From then on they are the same."
)
_BROKEN = 1e3  # times the largest spread of the run: out of all proportion


class Recoverer(Stateful):
    """Keeps snapshots of a run, and takes the run back; see :class:`Recovery` for the policy.

    A rollback is :meth:`restore`, then, once the caller has loaded the guard's state,
    :meth:`change`. Every rank restores its part of the run, and all ranks decide the same.

    Attributes:
        effect: what rollbacks have changed in the run so far.
        attempt: number of rollbacks so far, those before a resume included.
        rollbacks: the audit log.
        rate: what scales the optimizer's rate inside its steps.
        chains: those that the loop feeds back.
    """

    _owner = "a recovery"

    def __init__(self, settings: Recovery, ranks: Ranks, writer: Writer | None = None) -> None:
        self.settings, self._ranks = settings, ranks
        self._archive: Archive | None = None
        if settings.folder is not None:  # which stays where it is, wherever the trainer goes
            folder = folder_path("folder", settings.folder).absolute()
            self._archive = Archive(folder, settings.folder_every, ranks, writer)
        self.effect, self.attempt, self._rung = Change(), 0, 0
        self.rollbacks: list[Rollback] = []
        self._tried: list[tuple[str, bool]] = []  # remedies, and whether an alert named them
        self._restored: int | None = None  # the step of the last rollback's snapshot
        self._broke = 0  # that of its ERROR
        self._snapshots = Snapshots(settings.keep, settings.certify_after)
        longest = max(_STEPS_BEFORE, settings.certify_after)
        self._scales, self._spreads = deque[float](maxlen=longest), deque[float](maxlen=longest)
        self._is_settled = True  # no rule in force that leaves no snapshot to trust
        self._has_begun, self._ready = False, cast("Trainer | None", None)
        self._first: tuple[int, dict[str, Any]] | None = None  # the snapshot without its chains
        self._start: dict[str, Any] = {}  # random numbers before anything of the first step
        self._structure: dict[str, Any] = {}  # of the trainer that the snapshots fit
        self._at_begin: Callable[[dict[str, Any]], object] | None = None  # takes a capture
        self.rate = LearningRate()
        self.chains = ChainTracker()

    def read(self, row: Mapping[str, float]) -> None:
        """Take GradScale and the spread of f from the row of a step that is over."""
        value = row.get(GRAD_SCALE, math.nan)
        if ENERGY_GAP in row:
            spread = max(abs(row[ENERGY_GAP]), row.get("f_pos/std", 0.0))
            self._spreads.append(spread if math.isfinite(spread) else math.inf)
        if row.get(BETA_STAR, math.nan) == 0:
            self._scales.clear()  # the weights say nothing
        elif math.isfinite(value):
            self._scales.append(value)

    def _health(self, steps: int) -> tuple[bool, float]:
        """Return whether GradScale of the last steps was not low, and the median spread of f."""
        scales, spreads = [*self._scales][-steps:], [*self._spreads][-steps:]
        is_settled = not scales or statistics.median(scales) >= _SETTLED
        return is_settled, statistics.median(spreads or [0.0])

    def is_due(self, step: int, trainer: Trainer) -> bool:
        """Return whether a snapshot is due now."""
        kept = self._snapshots.best()
        if (now := structure_of(trainer)) != (then := self._structure):
            names = " and ".join(x for x in now | then if now.get(x) != then.get(x))
            if kept and kept.step < step - 1 and self._ranks.is_first:
                _log.warning(_OTHER, step, names)
            self.forget()
            return True
        return self._is_settled and (kept is None or step % self.settings.every == 0)

    def certify(self, judged: int, active: Mapping[str, Level]) -> None:
        """Certify snapshots that were quiet until ``judged``, after every row."""
        levels = {rule: Level.WARN if rule in _UNSETTLING else Level.ERROR for rule in active}
        self._is_settled = all(level < levels[rule] for rule, level in active.items())
        if not self._is_settled:
            self._snapshots.drop_waiting(judged - 1)
            return
        for ripe in self._snapshots.certify(judged, self._health):
            state, has_next = {**ripe.state}, ripe.state.pop("next", None) is not None
            if has_next and self._archive is not None and self._archive.is_due(ripe.step):
                self._archive.write(ripe.step, state, self.state_dict())

    def keep(self, step: int, trainer: Trainer, guard_state: Any) -> None:
        """Take a snapshot of the attached parts and of the guard's state, before ``step``."""
        state = capture(trainer, guard=guard_state, chains=copied(self.chains.held))
        self._snapshots.waiting.append(Snapshot(step, state, *self._health(_STEPS_BEFORE)))
        self._structure, self._at_begin = structure_of(trainer), None
        if self._archive is not None and self._archive.is_due(step):
            self._at_begin = lambda now: state.update(next=now)

    def start(self, trainer: Trainer) -> None:
        """Keep the random numbers from which the loop may begin."""
        self._start, self._at_begin = random_state(generators_of(trainer)), None

    def begin(self, step: int, trainer: Trainer, guard_state: Callable[[], Any]) -> None:
        """Note that a step has begun; the sampler, the inline factor and the loss call it."""
        if trainer.model is None or trainer.optimizer is None:
            return
        if self._at_begin is not None:
            act, self._at_begin = self._at_begin, None
            act(capture(trainer))
        if self._snapshots.best() is None and not any(map(is_lazy, trainer.model.parameters())):
            self.keep(step, trainer, guard_state())
            state = self._snapshots.waiting[0].state
            if self._archive is not None and (part := unloadable_part(state)):
                self.forget()
                raise ConfigError(f"Recovery(folder=...) could not be resumed from: {part}")
            state["next"], self._at_begin = {**state}, None
            state["random"], self._start = self._start or state["random"], {}
            self._first = step, state
        elif (first := self._first) is not None and (self.chains.held or step != first[0]):
            # There were no chains before the sampler's first call.
            first[1]["chains"], self._first = copied(self.chains.held), None

    @property
    def is_spent(self) -> bool:
        """True if no rollback is left; the run then goes on as it would without them."""
        return self.attempt >= self.settings.budget

    def check_alive(self, alerts: Sequence[Alert], *, is_lost: bool) -> None:
        """End, with a ``BudgetSpentError``, a lost run whose energies stay out of proportion."""
        if not (is_lost and self.is_spent and len(self._spreads) == self._spreads.maxlen):
            return
        most, spread = self._snapshots.spread, self._health(self.settings.certify_after)[1]
        errors = [alert for alert in alerts if alert.level is Level.ERROR]
        if errors and not CONSTANT * most <= spread <= _BROKEN * (most or 1.0):
            raise BudgetSpentError(errors[-1], self.attempt)

    def restore(self, step: int, trainer: Trainer, error: Alert) -> tuple[Rollback, Any]:
        """Put the run back; return the first half of a rollback, and the guard's state.

        It raises a ``ConfigError`` if a part was attached after the snapshot was taken.
        """
        settings, snapshots = self.settings, self._snapshots
        snapshots.drop_waiting(error.step)
        relapse, condemned = False, tuple[int, ...]()
        if (last := self._restored) is not None:
            took, held = self._broke - last, error.step - last
            relapse = held <= max(settings.relapse_within, 2 * took)
            if held <= max(settings.relapse_within, took):  # it has not come farther
                condemned = snapshots.condemn(last)
        snapshot = snapshots.best()
        assert snapshot is not None, "one is taken before the first update"
        check_fits(trainer, snapshot.state)
        before, target = capture(trainer), snapshot.step
        try:
            restore(trainer, snapshot.state)
        except MISFITS as misfit:
            restore(trainer, before)
            text = f"The run could not be taken back to step {target} and is as it was: {misfit!r}"
            raise ConfigError(text) from misfit
        self.chains.put_back(snapshot.state.get("chains", {}))
        snapshots.restart_from(snapshot)
        self.attempt += 1
        self._restored, self._broke = target, error.step
        self._scales.clear()
        self._spreads.clear()
        facts = self.attempt, snapshot in snapshots.certified, relapse, condemned
        left = settings.budget - self.attempt
        return Rollback(error, step - 1, target, *facts, left), snapshot.state["guard"]

    def change(
        self, rollback: Rollback, trainer: Trainer, now: Situation, *, knows_steps: bool
    ) -> Rollback:
        """Change the run that was put back, so that it is not lost in the same way again."""
        changes: dict[str, tuple[float, float]] = {}
        if now.is_sharp:  # it needs its finer steps before it would find that out again
            most = max(now.substeps, self.effect.substeps)
            self.effect = replace(self.effect, substeps=most)
        usual_steps = trainer.sgld_steps if knows_steps else None
        groups = () if trainer.optimizer is None else trainer.optimizer.param_groups
        rates = [float(x["lr"]) for x in groups if x.get("lr") is not None]
        for change in self._rungs(rollback, now):
            changes, self.effect = self._applied(change, now, usual_steps, rates)
            if changes or change == Change():
                break
        self.rate.factor = self.effect.lr
        reseeded = reseed(self.attempt, generators_of(trainer)) if self.settings.reseed else 0
        rollback = replace(rollback, changes=changes, reseeded=reseeded)
        self.rollbacks.append(rollback)
        if self._ranks.is_first:
            _log.warning(rollback.message)
        return rollback

    def _rungs(self, rollback: Rollback, now: Situation) -> Iterator[Change]:
        """Yield the changes to try in turn, until one of them changes the run."""
        if ladder := self.settings.ladder:
            for change in ladder[min(self._rung, len(ladder) - 1) :]:
                self._rung += 1
                yield change
            return
        alert, tried = rollback.alert, [remedy for remedy, _ in self._tried]
        now = replace(now, samples_above=alert.tag == ENERGY_GAP and alert.value < 0)
        causes = sorted({*BY_CAUSE} & {*alert.remedies}, key=alert.remedies.index)
        order = filter(now.allows, dict.fromkeys((*causes, *FALLBACK)))
        for remedy in sorted(order, key=tried.count):
            if remedy in tried and not rollback.relapse:
                return  # what has held for so long is not taken farther
            named = remedy in causes  # it may undo what no alert has named
            before = [other for other, was_named in self._tried if was_named or not named]
            if not any(contradict(remedy, other) for other in (*causes, *before)):
                self._tried.append((str(remedy), named))
                yield BY_CAUSE[remedy]
                self._tried.pop()  # it changed nothing

    def _applied(
        self, change: Change, now: Situation, usual_steps: int | None, rates: list[float]
    ) -> tuple[dict[str, tuple[float, float]], Change]:
        """Return the values before and after a change, and the sum of all changes with it."""
        values: dict[str, tuple[float, float]] = {}
        before, star, effect = self.effect, now.beta_star, self.effect
        if change.beta_factor != 1 and math.isfinite(star):
            star *= change.beta_factor
            least = before.beta_star and before.beta_star * change.beta_factor
            factor = before.beta_factor * change.beta_factor
            effect = replace(effect, beta_star=least, beta_factor=factor)
        if change.beta_star is not None:
            raised = min(change.beta_star, now.most)
            # Never to the other side of 0, where all is reversed.
            if star < raised and star * raised >= 0:
                star = raised
                effect = replace(effect, beta_star=raised)
        if math.isfinite(star) and star != now.beta_star:
            values["beta_star"] = (now.beta_star, star)
        if usual_steps is not None:
            factors = before.sgld_steps, before.sgld_steps * change.sgld_steps
            old, new = (max(1, round(usual_steps * factor)) for factor in factors)
            if new != old:
                values["sgld_steps"] = (float(old), float(new))
                effect = replace(effect, sgld_steps=factors[1])
        finer = min(now.substeps * change.substeps, now.most_substeps)
        if finer > now.substeps:
            values["substeps"] = (float(now.substeps), float(finer))
            effect = replace(effect, substeps=finer)
        if change.lr != 1 and rates:
            name = "lr" if len(set(rates)) == 1 else "largest_lr"
            rate = max(rates) * before.lr
            values[name] = (rate, rate * change.lr)
            effect = replace(effect, lr=before.lr * change.lr)
        return values, effect if values else before

    def save_restored(self, trainer: Trainer, guard_state: Any) -> None:
        """Write the run as a rollback has left it, in case the process dies soon after."""
        if (archive := self._archive) is not None and (step := self._restored) is not None:
            history, chains = self.state_dict(), copied(self.chains.held)
            state = capture(trainer, guard=guard_state, chains=chains)
            archive.write(step, state, history)
            self._at_begin = lambda now: archive.write(step, state | {"next": now}, history)

    def check_ready(self, trainer: Trainer) -> None:
        """Refuse to begin a run that could not be taken back, or one over another's snapshots."""
        if trainer is not self._ready:
            check_complete(trainer)
            self._ready = trainer
        if self._archive is not None:
            self._archive.claim()
            if not self._has_begun:
                self._archive.check_empty()
            self._has_begun = True

    def resume(
        self, trainer: Trainer, guard_state: Callable[[], Any], load_guard: Callable[[Any], None]
    ) -> int | None:
        """Go on from the newest snapshot that all ranks can load; return its step, if there is any.

        ``load_guard`` loads what ``guard_state`` returns. A ``ConfigError`` leaves all as it was:
        no snapshot can be loaded, or there is no ``folder``.
        """
        if self._archive is None:
            raise ConfigError("g.resume() needs recovery=Recovery(folder=...).")
        check_complete(trainer)
        self._archive.claim()
        before: list[dict[str, Any]] = []  # the state before the first change

        def put(state: Mapping[str, Any]) -> None:
            restore(trainer, state)
            load_guard(state["guard"])

        def take(saved: Mapping[str, Any]) -> None:
            check_fits(trainer, saved["state"])
            self._read(saved["recovery"])
            before.extend([] if before else [capture(trainer, guard=guard_state())])
            # The loop draws the first batch anew.
            put({**saved["state"], **saved["state"]["next"], "random": saved["state"]["random"]})

        try:
            saved = self._archive.newest(take)
        except EbmguardError:
            for state in before:
                put(state)
            raise
        self.forget()
        self.start(trainer)
        if saved is None:
            return None
        self.load_state_dict(saved["recovery"])
        snapshot, then = Snapshot(saved["step"], saved["state"]), saved["state"].pop("next")

        def put_late(now: dict[str, Any]) -> None:
            if structure_of(trainer) == self._structure:
                others = restore_changed(trainer, then, now)
                if "random" in others and self._ranks.is_first:
                    _log.warning(_OTHER_NUMBERS, snapshot.step)

        self._at_begin = put_late
        self._archive.saved = snapshot.step
        self._snapshots.certified = [snapshot]
        self._structure = structure_of(trainer)
        return snapshot.step

    def _saved(self) -> dict[str, Any]:
        counts = {"attempt": int, "_rung": int, "_restored": int | None, "_broke": int}
        return counts | {"_tried": list[tuple[str, bool]], "effect": Change}

    def _take(self, read: Mapping[str, Any]) -> None:
        super()._take(read)
        self.rate.factor = self.effect.lr
        self._scales.clear()
        self._spreads.clear()
        self._has_begun = True
        self.forget()

    def forget(self) -> None:
        """Drop all snapshots: none is of the run as it is now."""
        self._snapshots.certified, self._snapshots.waiting = [], []
        self._start, self._at_begin, self._first = {}, None, None
        if self._archive is not None:
            self._archive.saved = None
