"""The guard's side of the training loop: the path of a row, and where a step begins and ends."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..alerts import Alert, Judge, Level, Situation, VerdictTracker, error_for
from ..alerts.skill import Skill
from ..check import SelfCheck, find_problems
from ..errors import ConfigError, SamplerError
from ..ranks import Batch
from ..sampling import Recording, is_capturing
from ..sinks import Writer
from ..sinks.call_queue import CallQueue, queued
from ..trainer import Trainer, TrainerParts
from .actions import Actions
from .closing import finish, remove_hooks, write_the_rest
from .finer_steps import FinerSteps
from .first_losses import FirstLosses
from .measure import Measure
from .optimizer import OptimizerHooks
from .ownership import Ownership
from .parts import Row
from .rows import Rows, StepRow
from .sampling import CAPTURED, OTHER_THREAD, Sampling
from .setup import setup_of
from .strength import Settings, Strength, StrengthAt, checked_trainer
from .watches import Calibration, UnusedSamples

if TYPE_CHECKING:
    from ..recovery import Recoverer

__all__ = ["Loop"]

_log = logging.getLogger("ebmguard")


class Loop:
    """Connects the parts, which do not know of one another: passes results on to the next."""

    def __init__(
        self,
        settings: Settings,
        strength: Strength,
        judge: Judge,
        actions: Actions,
        writer: Writer,
        fineness: FinerSteps,
    ) -> None:
        self.trainer = Trainer()
        self.last: Row = {}
        self.members: list[Row] = []
        self.paused_by: int | None = None  # the thread that has
        self.is_inline = False  # whether the sampler asks for the factor itself
        self.settings, self.strength = settings, strength
        self.actions, self.writer, self._judge = actions, writer, judge
        self.turns = CallQueue(writer.turns.lock)
        self.rows = Rows(settings.models, settings.judge_in_loss, settings.block)
        self.first_calls, self.first_losses = Calibration(settings), FirstLosses(settings)
        self.hooks: OptimizerHooks | None = None
        self._now: tuple[object, StrengthAt] | None = None
        self.sampling, self.measure = Sampling(len(settings.models)), Measure(settings)
        rolls_back = settings.action == "rollback"
        self.fineness, self.claims = fineness, Ownership(self, rolls_back=rolls_back)
        self.course, self.self_check, self.unused = VerdictTracker(), SelfCheck(), UnusedSamples()
        self.skill, self.is_closed = Skill(settings.skill), False
        self._hung: list[weakref.ref[OptimizerHooks]] = []
        # Runs at exit too, and so must hold no reference to the guard, nor to what may hold one.
        weakref.finalize(self, finish, self.rows, writer, self.first_losses, self._hung)

    def __deepcopy__(self, memo: dict[int, Any]) -> Loop:
        """A copy that writes nothing and hangs on nothing, as of a module that holds its guard."""
        copied = memo[id(self)] = Loop.__new__(Loop)
        bare: dict[str, Any] = {"writer": Writer((), flush_every=1), "hooks": None, "_hung": []}
        bare["claims"] = Ownership(copied)
        vars(copied).update(copy.deepcopy(vars(self) | bare, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "A guard is not pickled: it holds hooks and open files of its process. Send the "
            "settings, and call guard(...) there; what it has seen is g.state_dict()."
        )

    def check_open(self) -> None:
        """Refuse calls of a closed guard, except while it is paused."""
        if self.is_closed and not self.paused_by:
            raise ConfigError(
                "This guard is closed. Take it into use again by g.attach(), or make another one; "
                "for pictures call `sampler.original`, or call it inside `with g.paused():`."
            )

    def strength_at(self, step: int) -> StrengthAt:
        """Return a step's values. A schedule is asked once: sampler and loss share its answer."""
        asked = step if self.strength.is_scheduled else 0, *self.actions.beta_star
        if self._now is None or self._now[0] != asked:
            self._now = asked, self.strength.at(*asked)
        return self._now[1]

    def read_all(self) -> None:
        """Read the rows that wait, and the one under way so far."""
        self.follow(self.rows.so_far)

    def can_wait(self, batch: Batch) -> bool:
        """Return whether a loss's row can be read later, as no rule can take it for an ERROR."""
        acts = self.fineness.acts or self.strength.is_scheduled or self.actions.pending is not None
        if acts or not self.rows.can_wait or (calm := self._judge.calm) is None:
            return False
        gap, spread, sharpness, sums = self.measure.pulse(batch)
        is_calm = calm[0] < abs(gap) + spread < calm[1] and math.isfinite(sums)
        return is_calm and not sharpness > self.fineness.watched

    @queued
    def follow(self, due: Callable[..., Iterable[StepRow]], *args: Any) -> None:
        """Judge the rows that are due, act on them, write them and report them."""
        for row in due(*args):
            try:
                alerts = self._judged(row)
            finally:
                if row.is_over and not self.is_closed:  # as one that a handler has closed
                    self.writer.write(row.step, row.numbers | row.logged, row.samples)
            is_due = row.is_over and self.self_check.is_due(row.numbers)
            if is_due and self._now and self.settings.ranks.is_first:
                self.self_check.say(find_problems(setup_of(self, self._now[1], is_running=True)))
            if alerts:
                self.actions.report(alerts)

    def _judged(self, row: StepRow) -> list[Alert]:
        if self.strength.is_scheduled:  # else it was checked when it was passed
            for member in row.members or [row.numbers]:
                if "beta_star" in member:
                    self.strength.check_measured(row.step, member["beta_star"])
        self.last, self.members = row.numbers | row.logged, row.members
        observed = self._judge.observe(row.step, row.numbers, row.members) if row.is_news else []
        if row.is_over and row.logged:
            observed += self.skill.observe(row.step, row.logged)
        alerts: list[Alert] = []
        for alert in observed:
            numbers = row.numbers if alert.member is None else row.members[alert.member]
            values = numbers.get("beta_star"), self.strength.most_raised, numbers
            now = self.fineness.known(self.actions.situation(self.trainer, *values), row.step)
            alerts.append(self.actions.advised(alert, now, self.course.lost_since))
        level = max(self._judge.level, self.skill.level)
        if row.is_news or alerts:
            self.rows.note({"alert_level": float(level)}, row)
        if row.is_over:
            is_lost = Level.ERROR in self._judge.active.values()
            alerts += self.fineness.read(row.step, row.numbers, is_lost=is_lost)
        self.actions.observe(row, alerts)
        is_whole = row.is_over and self.actions.takes_back and self.actions.pending is None
        if is_whole and (recoverer := self.actions.recoverer) is not None:
            self.actions.attempt(recoverer.certify, row.step + 1, self._judge.active)
        worst = ""
        if alerts:
            # So that a reader of the folder knows what an ERROR at its end has done.
            action = "rollback" if self.actions.takes_back else self.settings.action
            acts = {Level.ERROR: {"action": action}} if self.actions.answers else {}
            self.writer.write_alerts([x.record() | acts.get(x.level, {}) for x in alerts])
            worst = max(alerts, key=lambda alert: alert.level).rule
        if self.course.update(row.step, level, worst):
            self.writer.write_verdict(row.step, str(self.course.verdict))
        return alerts

    def sample(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the sampler on the tempered energy, and return its result."""
        if self.sampling.turn.thread == get_ident() or self.paused_by == get_ident():
            return call(*args, **kwargs)
        return self.sampling.turn.run(partial(self._sample, call, args, kwargs))

    def _sample(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], is_free: bool
    ) -> Any:
        if self.paused_by or not is_free:
            if self.strength_at(self.rows.step).must_temper:
                raise SamplerError(OTHER_THREAD)
            return call(*args, **kwargs)
        self.begin_sampling()
        now, slow, trainer = self.strength_at(self.rows.step), self.rows.is_slow, self.trainer
        if (name := trainer.steps_argument) is not None:
            args, kwargs = self.actions.with_steps(name, call, args, kwargs)
        awaits = self.first_calls.calls_left > 0
        if (recoverer := self.actions.recoverer) is not None:
            recoverer.chains.enter(call, args, kwargs, trainer.buffer)
        parts = call, trainer.model, *args, *kwargs.values()
        attempt = 0 if recoverer is None else recoverer.attempt
        finer = self.fineness.of_call(self.rows.step, attempt, parts)
        looks = finer is not None and finer.moves is None
        first = self.first_calls
        drift = self.fineness.drift(finer) if looks else first.drift(parts, now, finer)
        recording: Recording | None = drift
        if recording is None and slow and trainer.steps is not None:
            recording = Recording(ends=2, has_draws=False)
        inputs = call, args, kwargs, trainer, self.strength, now, recording, finer
        result, tempering = self.sampling.run(*inputs)
        if recoverer is not None:
            recoverer.chains.leave(result)
        if drift is not None:
            first.take(drift, tempering, result)
            if looks:
                self.fineness.looked(drift, result)
        if awaits:
            acts = self.strength.is_scheduled or not now.is_off
            strength, alerts = self.first_calls.compared(self.strength, self.rows.step, acts=acts)
            if strength is not self.strength:
                self.strength, self._now = strength, None
            self.actions.alerts += alerts
            self.writer.write_alerts([alert.record() for alert in alerts])
            self.actions.report(alerts)
        self.first_losses.sampled(tempering, result, parts, first)
        last = () if recording is None else recording.evaluations[-2:]
        sizes = trainer.steps or first.sizes
        self.measure.sampled(trainer, tempering, result, last, finer, sizes=sizes, slow=slow)
        flags = {"acts": not now.is_off, "tempers": now.must_temper}
        self.unused.sample(tempering, result, sets=self.actions.sets_steps, **flags)
        return result

    def begin_sampling(self) -> None:
        """A sampler call begins, or an inline one asks for the factor: a safe point."""
        if is_capturing():
            raise SamplerError(CAPTURED)
        self.check_open()
        if self.hooks is not None:
            self.hooks.finish()
        # Where no optimizer tells that a step is over, the next sampler call does.
        if not self.is_told_steps and self.rows.losses_in_step:
            self.follow(self.rows.end_step)
        self.raise_pending()
        self.actions.begin(self.rows.step, self.trainer, self.own_state)

    @property
    def is_told_steps(self) -> bool:
        """Return whether an optimizer tells that a step is over."""
        return self.hooks is not None and not self.hooks.unended.is_found

    def check_steps(self) -> None:
        """Check, before a loss, that the attached optimizer is the one that steps."""
        if self.hooks is None:
            return
        unended, losses = self.hooks.unended, self.rows.losses_in_step
        energy = partial(self.sampling.parameters, self.trainer)
        context = losses, energy, self.settings
        instead = unended.check(*context, lambda: self.strength_at(self.rows.step).is_off)
        if unended.is_found and self.actions.takes_back:
            self.actions.end_rollbacks()  # no step would ever carry one out
        if instead is not None:
            self._take_trainer(self.trainer.extended(optimizer=instead))

    def _end_step(self, skipped: float | Tensor, by_scaler: bool) -> None:
        """The optimizer has ended the step: ``on_step`` of :class:`~.optimizer.OptimizerHooks`."""
        recoverer = self.actions.recoverer
        if self.hooks is not None:
            self.hooks.unended.stepped(self.rows.losses_in_step)
        if recoverer is not None and (recoverer.attempt or self.actions.offer is None):
            self.rows.note({"recovery/attempt": float(recoverer.attempt)})
        self.rows.note_news("scaler/skipped" if by_scaler else "nonfinite/gradients", skipped)
        self.follow(self.rows.end_step)
        self.raise_pending()
        if recoverer is not None and self.actions.takes_back:
            self.actions.attempt(self._keep_or_roll_back, recoverer)

    def raise_pending(self) -> None:
        """Raise, at a safe point, the ERROR that waits with ``action="raise"``."""
        if self.settings.action == "raise" and (alert := self.actions.take_pending()) is not None:
            self.course.is_ended = True
            self.writer.write_verdict(self.course.since, str(self.course.verdict))
            self.writer.flush()
            raise error_for(alert, self._judge.rules)(alert)

    def _keep_or_roll_back(self, recoverer: Recoverer) -> None:
        actions, step = self.actions, self.rows.step
        error = actions.pending  # until all is back: an interrupt leaves it to the next step
        if error is None:
            recoverer.check_alive(actions.alerts, is_lost=self._judge.level is Level.ERROR)
            if recoverer.is_due(step, self.trainer):
                self.read_all()  # which may be an ERROR
                if actions.pending is None and recoverer.is_due(step, self.trainer):
                    recoverer.keep(step, self.trainer, self.own_state())
            return
        write_the_rest(self.rows, self.writer)  # rows of steps that are taken back
        fineness = self.situation  # as the chains were when it broke
        rollback, guard_state = recoverer.restore(step, self.trainer, error)
        self.load_own_state(guard_state)
        self._judge.after_rollback()
        self.course.rolled_back(recoverer.attempt, rollback.restored_step, error.rule)
        names = "substeps", "most_substeps", "is_sharp"
        now = replace(self.situation, **{name: getattr(fineness, name) for name in names})
        rollback = recoverer.change(rollback, self.trainer, now, knows_steps=actions.asks_steps)
        self.fineness.least = recoverer.effect.substeps
        recoverer.save_restored(self.trainer, self.own_state())
        self.writer.write_recovery(rollback.record())

    @property
    def situation(self) -> Situation:
        """The state of a run of one model. It reads the device: call it between steps."""
        beta_star = float(self.strength_at(self.rows.step).beta_star)
        now = self.actions.situation(self.trainer, beta_star, self.strength.most_raised)
        return self.fineness.known(now, self.rows.step)

    def attach(self, parts: TrainerParts, sampler: object) -> None:
        """See :meth:`ebmguard.Guard.attach`."""
        trainer = checked_trainer(self.trainer, parts, sampler)
        self.claims.take(trainer, sampler)
        if self.is_closed:
            self.writer.claim()
            self.is_closed = self.claims.is_over = False
        self._take_trainer(trainer)

    def _take_trainer(self, trainer: Trainer) -> None:
        self.actions.attach(trainer)
        if trainer.optimizer is not None:
            if self.hooks is not None:
                self.hooks.remove()
            # The optimizer may outlive the guard, and must not keep it.
            loop, recoverer = weakref.proxy(self), self.actions.recoverer
            self.hooks = OptimizerHooks(
                trainer.optimizer,
                trainer.scaler,
                lambda *outcome: loop._end_step(*outcome),
                # An update by the optimizer cannot be split by the members of an ensemble.
                is_watched=lambda: loop.rows.is_slow and not loop.settings.models,
                on_update=self.measure.update,
                process_group=self.settings.process_group,
                rate=None if recoverer is None else recoverer.rate,
            )
            self._hung[:] = [weakref.ref(self.hooks)]
        self.trainer = trainer

    @queued
    def close(self) -> None:
        """See :meth:`ebmguard.Guard.close`."""
        self.claims.is_over = True
        remove_hooks(self.first_losses, self._hung)
        for row in self.rows.drain():  # one by one: all of them, whatever a callback raises
            self.follow(iter, [row])
        self._leave()

    @queued
    def _leave(self) -> None:
        speaks = self.settings.ranks.is_first and not self.is_closed
        if speaks and self.course.level:
            _log.warning("the run as it was closed: %s", self.course.verdict)
        if speaks and self.last and not self.skill.is_known:
            _log.warning("skill=%r: g.log was given no such number.", self.settings.skill)
        try:
            self.writer.flush(whole=True)
        finally:
            self.is_closed = True
            self.writer.release()

    @property
    def _parts(self) -> dict[str, Any]:
        """The parts whose state is the guard's, the judge first, which may refuse one."""
        parts = {"judge": self._judge, "fineness": self.fineness, "skill": self.skill}
        return parts | {"course": self.course, "measure": self.measure}

    def own_state(self, *, is_over: bool = False) -> dict[str, Any]:
        """Return the state that a rollback restores; ``is_over``: the current step ends here."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        parts |= {"measured": self.first_calls.state_dict(), "advised": self.actions.advice()}
        return self.rows.state_dict(is_over=is_over) | parts

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`own_state` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.rows.load_state_dict(state)
        self.actions.load_advice(state["advised"])
        self.first_calls.load_state_dict(state["measured"])  # last: it is over once it has begun
        self.strength = self.strength.knowing(self.first_calls.result, self.rows.step)
        self._now = None
