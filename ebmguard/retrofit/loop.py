"""The guard's side of the training loop: the one way of a row, and what begins and ends a step."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..alerts import Alert, Judge, Level, Situation, error_for
from ..energies import check_energies
from ..errors import LossError, SamplerError
from ..recovery import Recoverer
from ..samplers import Mixture
from ..sampling import Recording, is_capturing
from ..sinks import Writer
from ..trainer import Trainer
from .actions import Actions, single_number
from .callables import wrap_sampler
from .loss_fn import CallerLoss
from .measure import Measure
from .measuring import Measuring
from .optimizer import OptimizerHooks
from .rows import Row, Rows, StepRow
from .sampling import Sampling
from .settings import Settings
from .strength import Strength, StrengthAt
from .unused import Unused

__all__ = ["Loop"]

_log = logging.getLogger("ebmguard")


class Loop:
    """Knows the parts, which do not know each other, and carries what one returns to the next."""

    def __init__(
        self,
        *,
        settings: Settings,
        strength: Strength,
        caller_loss: CallerLoss,
        sampler: object | None,
        methods: Sequence[str],
        judge: Judge,
        actions: Actions,
        writer: Writer,
    ) -> None:
        self.sampler: Any = None if sampler is None else wrap_sampler(self, sampler, methods)
        self.trainer = Trainer()
        self.alerts = actions.alerts
        self.compute: Callable[..., Any] = operator.call
        self.rollbacks = [] if actions.recoverer is None else actions.recoverer.rollbacks
        self.last: Row = {}
        self.members: list[Row] = []
        self._settings = settings
        self._strength = strength
        self._now: tuple[object, StrengthAt] | None = None
        self._caller_loss = caller_loss
        self._sampling = Sampling(settings.models, tempers=strength.tempers)
        self._measuring = Measuring(settings)
        self._measure = Measure(settings)
        self._rows = Rows(settings.models, settings.judge_in_loss)
        self._judge = judge
        self._actions = actions
        self._writer = writer
        self._hooks: OptimizerHooks | None = None
        self._turn = [True]  # the one loss call at a time takes it; a lock could not be copied
        self._is_paused = False
        self._is_inline = False
        self._unused = Unused()
        # Runs at exit too, and so must hold no reference to the guard.
        weakref.finalize(self, _finish, self._rows, writer)

    def _strength_at(self, step: int) -> StrengthAt:
        """The values of a step. A schedule is asked once: sampler and loss share its answer."""
        asked = step, *self._actions.beta_star
        if self._now is None or self._now[0] != asked:
            self._now = asked, self._strength.at(*asked)
        return self._now[1]

    def _follow(self, rows: Iterable[StepRow]) -> None:
        """The one way of a row: judged, acted upon, written, reported."""
        for row in rows:
            for each in row.members or [row.numbers]:
                if "beta_star" in each:
                    self._strength.check_measured(row.step, each["beta_star"])
            self.last, self.members = row.numbers | row.logged, row.members
            alerts: list[Alert] = []
            if row.is_news:
                found = self._judge.observe(row.step, row.numbers, row.members)
                alerts = [self._advised(alert, row) for alert in found]
                level = max((alert.level for alert in alerts), default=Level.INFO)
                self._rows.note({"alert_level": float(level)}, row)
            self._actions.observe(row, alerts)
            self._writer.write_alerts([alert.record() for alert in alerts])
            if row.is_over:
                self._writer.write(row.step, row.numbers | row.logged, row.samples)
            self._actions.report(alerts)

    def _advised(self, alert: Alert, row: StepRow) -> Alert:
        numbers = row.numbers if alert.member is None else row.members[alert.member]
        beta_star, most = numbers.get("beta_star"), self._strength.most_raised
        now = self._actions.situation(self.trainer, beta_star, most, numbers)
        return self._actions.advised(alert, now)

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        try:
            turn = self._turn.pop()
        except IndexError:
            raise LossError(
                "The guarded loss was called while another call of it was under way: from a second "
                "thread, or inside loss_fn or on_alert. Losses belong to the steps of one training "
                "loop; give every thread a guard of its own."
            ) from None
        try:
            yield
        finally:
            self._turn.append(turn)

    def _begin_loss(self, f_pos: Tensor, f_neg: Tensor, beside: Mapping[str, Any]) -> StrengthAt:
        """Refuse what cannot be meant before anything changes; then end the step before."""
        if is_capturing():
            raise LossError(
                "The guarded loss was called while a CUDA graph is captured; the guard would miss "
                "every replay, and β would stay that of now. Capture the sampler and the network, "
                "and call the guarded loss outside of them at every step."
            )
        alone = self.sampler is None and self._hooks is None and not self._is_inline
        if alone:
            self._raise_pending()  # this loop has no other safe point
        self._actions.check_ready(self.trainer)
        # Where nothing else tells that a step is over, the next loss does.
        begins = alone and self._rows.losses_in_step > 0 and not self._is_paused
        strength = self._strength_at(self._rows.step + begins)
        check_energies(f_pos, f_neg, strength.beta_star, variant=self._settings.variant, **beside)
        if self.sampler is not None and not self._sampling.calls and not self._is_paused:
            raise SamplerError(
                "The loss was called, but the guarded sampler never was: the negatives come from "
                "elsewhere. Draw them with the sampler that guard() returned (is the name still "
                "bound to the original one?), or pass sampler=None."
            )
        self._caller_loss.check(f_pos, f_neg)
        self._measuring.check_direction(f_neg)
        if begins:
            self._follow(self._rows.end_step())
            return self._strength_at(self._rows.step)  # which that row may have steered
        return strength

    def _take_loss(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        beside: Mapping[str, Any],
        strength: StrengthAt,
        **extra: Tensor | None,
    ) -> None:
        """Measure a loss call, with further numbers by tag."""
        if self._is_paused:
            return
        self._unused.loss()
        self._rows.note(self._actions.notes())
        slow = self._rows.begin_loss(is_on_host=not f_pos.is_cuda)
        energies = self._upright(f_pos.detach(), f_neg.detach())
        given = self.trainer, *energies, strength, extra, self.compute
        self._follow(self._rows.add(*self._measure.loss(*given, slow=slow, **beside)))

    def _upright(self, f_pos: Tensor, f_neg: Tensor) -> tuple[Tensor, Tensor]:
        """The negative energies, high on data, whatever the caller's convention."""
        return (f_pos, f_neg) if self._settings.sign > 0 else (-f_pos, -f_neg)

    def _sample(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the sampler returns on the tempered energy."""
        if self._is_paused or self._sampling.is_running:
            return call(*args, **kwargs)
        self._begin_sampling()
        strength, slow = self._strength_at(self._rows.step), self._rows.is_slow
        if self.trainer.steps_argument is not None:
            steps = self._actions.ask_steps(for_refinement=False)
            kwargs = {**kwargs, self.trainer.steps_argument: steps.steps}
        recording = self._measuring.recording((call, self.trainer.model, *args, *kwargs.values()))
        seen = recording
        if seen is None and slow and self.trainer.steps is not None:
            seen = Recording(ends=2, has_draws=False)
        result, tempering = self._sampling.run(
            call,
            args,
            kwargs,
            self.trainer,
            strength.factor_of_samples,
            seen,
        )
        if recording is not None:
            self._measuring.take(recording, tempering)
            self._compare()
        self._measure.samples(
            self.trainer,
            tempering,
            result,
            self.compute,
            evaluations=() if seen is None else seen.evaluations[-2:],
            slow=slow,
            refinement=self._actions.refined_by,
            parts=call.parts if isinstance(call, Mixture) else None,
        )
        tempers = isinstance(strength.factor, Tensor) or strength.factor != 1.0
        module = None if tempering is None else tempering.module
        self._unused.sample(module, acts=not strength.is_off, tempers=tempers)
        return result

    def _compare(self) -> None:
        """Take the output scale that was measured, or hold the one that was given against it."""
        found, step = self._measuring.result, self._rows.step
        if not self._strength.awaits_scale:
            alerts = self._measuring.alert(self._strength.output_scale, step)
            self.alerts += alerts
            self._writer.write_alerts([alert.record() for alert in alerts])
            self._actions.report(alerts)
        elif found is not None and found.is_exact:
            self._strength = self._strength.with_scale(found.output_scale, step)
            self._now = None
            _log.info("%s", found)
        elif not self._measuring.calls_left:
            raise SamplerError(
                f'output_scale="measure": {found} Pass a number, 2 * step_size / noise_std**2, or '
                "leave it out: the weights then act, and the sampler stays as it is."
            )

    def _begin_sampling(self) -> None:
        if is_capturing():
            raise SamplerError(
                "The guard was called inside a sampler that is being captured as a CUDA graph, or "
                "in a capture around it, and would miss every replay: β and the step would stay "
                "those of now. Give it the sampler, guard(loss_fn, sampler, ...), capture and "
                "replay inside that, and call the guarded one at every step."
            )
        self._end_step_before()
        self._raise_pending()

    def _end_step_before(self) -> None:
        """Where no optimizer tells that a step is over, the next sampler call does."""
        if self._hooks is None and self._rows.losses_in_step:
            self._follow(self._rows.end_step())

    def _end_step(self, skipped: float | Tensor, by_scaler: bool) -> None:
        """The optimizer has ended the step: ``on_step`` of :class:`~.optimizer.OptimizerHooks`."""
        recoverer = self._actions.recoverer
        if recoverer is not None:
            self._rows.note({"recovery/attempt": float(recoverer.attempt)})
        self._rows.note_news("scaler/skipped" if by_scaler else "nonfinite/gradients", skipped)
        self._follow(self._rows.end_step())
        self._raise_pending()
        if recoverer is not None:
            self._keep_or_roll_back(recoverer)

    def _raise_pending(self) -> None:
        """At a safe point: raise the ERROR that waits with ``action="raise"``."""
        if self._settings.action == "raise":
            alert = self._actions.take_pending()
            if alert is not None:
                self._writer.flush()
                raise error_for(alert, self._judge.rules)(alert)

    def _keep_or_roll_back(self, recoverer: Recoverer) -> None:
        actions, step = self._actions, self._rows.step
        error = actions.take_pending()
        if error is None:
            if recoverer.observe(step, step - self._rows.lag, self._judge.active):
                recoverer.keep(step, self.trainer, self._own_state())
            return
        _write_the_rest(self._rows, self._writer)  # rows of steps that are taken back
        rollback, guard_state = recoverer.restore(step, self.trainer, error)
        self._load_own_state(guard_state)
        self._judge.after_rollback()
        rollback = recoverer.change(
            rollback, self.trainer, self._situation, knows_steps=actions.asks_steps
        )
        actions.after_rollback(rollback)
        recoverer.save_restored(self.trainer, self._own_state())
        self._writer.write_recovery(rollback.record())

    @property
    def _situation(self) -> Situation:
        """What the run is like at the step that comes next. Read on the host: between steps."""
        beta_star = single_number(self._strength_at(self._rows.step).beta_star)
        return self._actions.situation(self.trainer, beta_star, self._strength.most_raised)

    def _own_state(self, *, is_over: bool = False) -> dict[str, Any]:
        """What a rollback takes back of the guard; ``is_over``: the present step ends here."""
        return {
            **self._rows.state_dict(is_over=is_over),
            "measure": self._measure.state_dict(),
            "measured": self._measuring.state_dict(),
            "judge": self._judge.state_dict(),
            **self._actions.steering_state(),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._judge.load_state_dict(state["judge"])  # which may refuse it
        self._measure.load_state_dict(state["measure"])
        self._rows.load_state_dict(state)
        self._measuring.load_state_dict(state["measured"])
        if self._strength.awaits_scale and self._measuring.result is not None:
            self._strength = self._strength.with_scale(
                self._measuring.result.output_scale, self._rows.step
            )
        self._actions.load_steering(state)
        self._now = None


def _write_the_rest(rows: Rows, writer: Writer) -> None:
    """Write the rows that are under way, unjudged."""
    for row in rows.drain():
        writer.write(row.step, row.numbers | row.logged, row.samples)


def _finish(rows: Rows, writer: Writer) -> None:
    _write_the_rest(rows, writer)
    writer.close()
