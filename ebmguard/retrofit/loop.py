"""The guard's side of the training loop: the one way of a row, and what ends a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..alerts import Judge, Level, error_for
from ..energies import Groups, LogQ
from ..errors import ConfigError
from ..sinks import Writer
from ..trainer import Trainer
from .actions import Actions, single_number
from .measure import Measure
from .rows import Row, Rows, StepRow
from .settings import Settings
from .strength import Strength, StrengthAt

__all__ = ["Loop"]


class Loop:
    """Knows the parts, which do not know each other, and carries what one returns to the next.

    Args:
        settings, strength, judge, actions, writer: of the guard.

    Attributes:
        trainer: what is known of the rest of the trainer.
        measure, rows, actions, writer: the parts that others call.
        last, members: as :class:`ebmguard.Guard` has them.
    """

    def __init__(
        self, settings: Settings, strength: Strength, judge: Judge, actions: Actions, writer: Writer
    ) -> None:
        self.trainer = Trainer()
        self.measure = Measure(settings)
        self.rows = Rows(settings.models, settings.judge_in_loss)
        self.actions = actions
        self.writer = writer
        self.last: Row = {}
        self.members: list[Row] = []
        self._settings = settings
        self._strength = strength
        self._judge = judge
        self._now: tuple[int, StrengthAt] | None = None

    def strength_at(self, step: int) -> StrengthAt:
        """The values of a step. A schedule is asked once: sampler and loss share its answer."""
        if self._now is None or self._now[0] != step:
            self._now = step, self.actions.strength_at(self._strength, step)
        return self._now[1]

    def take_loss(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        strength: StrengthAt,
        groups: Groups | None,
        log_q: LogQ | None,
        extra: Mapping[str, Tensor | None],
    ) -> None:
        """Measure a loss call.

        Args:
            f_pos: detached negative energies, high on data.
            f_neg: the same for negatives.
            strength: the exponent in use.
            groups: class labels, as for the loss.
            log_q: log-densities of the proposal, as for the loss.
            extra: further numbers by tag, those that are known.
        """
        self.rows.note(self.actions.notes())
        slow = self.rows.begin_loss(is_on_host=not f_pos.is_cuda)
        numbers, samples = self.measure.loss(
            self.trainer, f_pos, f_neg, strength, groups, log_q, extra, slow=slow
        )
        self._follow(self.rows.add(numbers, samples))

    def _follow(self, rows: Iterable[StepRow]) -> None:
        """The one way of a row: judged, written, acted upon."""
        for row in rows:
            for each in row.members or [row.numbers]:
                if "beta_star" in each:
                    self._strength.check_measured(row.step, each["beta_star"])
            self.last, self.members = row.numbers, row.members
            alerts = []
            if row.is_news:
                alerts = self._judge.observe(row.step, row.numbers, row.members)
                level = float(max((alert.level for alert in alerts), default=Level.INFO))
                if row.is_over:
                    row.numbers["alert_level"] = max(level, row.numbers.get("alert_level", level))
                else:
                    self.rows.note({"alert_level": level})
            self.writer.write_alerts([alert.record() for alert in alerts])
            if row.is_over:
                self.writer.write(row.step, row.numbers, row.samples)
            self.actions.observe(row, alerts)

    def end_step(self) -> None:
        """The step is over; take the rows that are due by now their way."""
        self._follow(self.rows.end_step())

    def end_step_by_optimizer(self, skipped: float | Tensor, by_scaler: bool) -> None:
        """The optimizer has ended the step.

        Args: as of ``on_step`` of :class:`~.optimizer.OptimizerHooks`.

        Raises:
            DivergenceError: an ERROR with ``action="raise"``; with "rollback" where no rollback is
                left.
        """
        if self.actions.recoverer is not None:
            self.rows.note({"recovery/attempt": float(self.actions.recoverer.attempt)})
        self.rows.note_news("scaler/skipped" if by_scaler else "nonfinite/gradients", skipped)
        self.end_step()
        if self.actions.recoverer is None:
            self.raise_pending()
        else:
            self._keep_or_roll_back()

    def raise_pending(self) -> None:
        """At a safe point: raise the ERROR that waits with ``action="raise"``.

        Raises:
            DivergenceError: the typed error of the first ERROR.
        """
        if self._settings.action == "raise":
            alert = self.actions.take_pending()
            if alert is not None:
                self.writer.flush()
                raise error_for(alert, self._judge.rules)(alert)

    def _keep_or_roll_back(self) -> None:
        actions, recoverer = self.actions, self.actions.recoverer
        assert recoverer is not None
        error, step = actions.take_pending(), self.rows.step
        if error is None:
            if recoverer.observe(step, step - self.rows.lag, self._judge.active):
                recoverer.keep(step, self.trainer, self.own_state())
            return
        self.write_unjudged()  # rows of steps that are taken back
        restored = recoverer.restore(step, self.trainer, error)
        self.load_own_state(restored.guard_state)
        beta_star = single_number(self.strength_at(self.rows.step).beta_star)
        rollback = recoverer.change(
            restored, self.trainer, beta_star, knows_steps=actions.asks_steps
        )
        self._now = None
        actions.after_rollback()
        recoverer.save_restored(self.trainer, self.own_state())
        self.writer.write_recovery(rollback.record())

    def resume(self) -> int | None:
        """Go on from the newest snapshot on the disk; see :meth:`ebmguard.Guard.resume`."""
        recoverer = self.actions.recoverer
        if recoverer is None:
            raise ConfigError('g.resume() needs action="rollback" and Recovery(folder=...).')
        snapshot = recoverer.resume(self.trainer)
        if snapshot is None:
            return None
        self.load_own_state(snapshot.state["guard"])
        return snapshot.step

    def write_unjudged(self) -> None:
        """Write the rows under way as they are."""
        write_the_rest(self.rows, self.writer)

    def close(self) -> None:
        """Judge and write what is still under way, and flush."""
        self._follow(self.rows.drain())
        self.writer.flush()
        self.writer.release()

    def own_state(self, *, is_over: bool = False) -> dict[str, Any]:
        """What a rollback takes back of the guard.

        Args:
            is_over: whether the present step ends here.
        """
        return {
            **self.rows.state_dict(is_over=is_over),
            "measure": self.measure.state_dict(),
            "judge": self._judge.state_dict(),
            **self.actions.steering_state(),
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`own_state` returned.

        Raises:
            ConfigError: of other rules, or of another number of members. Nothing has changed then.
        """
        self._judge.load_state_dict(state["judge"])
        self.measure.load_state_dict(state["measure"])
        self.rows.load_state_dict(state)
        self.actions.load_steering(state)
        self._now = None


def write_the_rest(rows: Rows, writer: Writer) -> None:
    """Write the rows that are under way, unjudged."""
    for row in rows.drain():
        writer.write(row.step, row.numbers, row.samples)
