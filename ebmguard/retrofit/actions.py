"""What changes the course of a run: rollbacks, and steering where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from ..recovery import Recoverer, Recovery, Rollback
from ..recovery.state import check_run
from ..steering import AdaptiveSteps, BetaController, StepsController
from .alarm import Alarm
from .attached import Attached
from .journal import Journal
from .rows import Monitor, Row
from .strength import Strength, StrengthAt

__all__ = ["Course"]


class Course:
    """The strength and the number of SGLD steps of each step, and the way back.

    Args:
        strength: what the caller asked for.
        recovery: settings of ``action="rollback"``; None without it.
        adapt: settings of the number of SGLD steps; None leaves it.
        steer: moves β* from row to row; None leaves it.
        alarm: whose ERRORs lead to a rollback.
        journal: counts the steps, and rewinds.
        monitor: whose sinks get the audit log.
        process_group: ranks that roll back together.

    Attributes:
        recoverer: None without ``action="rollback"``.
    """

    def __init__(
        self,
        strength: Strength,
        recovery: Recovery | None,
        adapt: AdaptiveSteps | None,
        steer: BetaController | None,
        alarm: Alarm,
        journal: Journal,
        monitor: Monitor,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.recoverer = None if recovery is None else Recoverer(recovery, process_group)
        self._strength = strength
        self._alarm = alarm
        self._journal = journal
        self._monitor = monitor
        self._now: tuple[int, StrengthAt] | None = None
        self._run = Attached()
        self._adapt = adapt
        self._steps: StepsController | None = None
        self._steer = steer
        self._steps_were_read = False
        self._is_refined = False
        journal.listeners.append(self._observe)

    def attach(self, run: Attached) -> None:
        """Take what is attached; before any hook that looks at the optimizer after its step."""
        if self.recoverer is not None and run.optimizer is not None:
            self.recoverer.watch(run.optimizer)
        if self._adapt is not None and run.sgld_steps not in (None, self._run.sgld_steps):
            self._steps = self._adapt.start(run.sgld_steps)
        self._run = run

    def require(self) -> None:
        """Refuse to begin a run that could not be taken back, or whose steps nobody can change.

        Raises:
            ConfigError: with what must be attached.
        """
        if self.recoverer is not None:
            check_run(self._run)
            self.recoverer.check_folder()
        if self._adapt is not None and not self._steps_were_read:
            raise ConfigError(
                "adapt= changes the number of SGLD steps, but the sampler has not asked for it. "
                "Attach the usual number, g.attach(sgld_steps=20), and name the sampler's "
                'parameter, steps_argument="n_steps", or let it take g.sgld_steps steps.'
            )

    def strength_at(self, step: int) -> StrengthAt:
        """The values of a step. A schedule is asked once: sampler and loss share its answer."""
        if self._now is None or self._now[0] != step:
            values = self._strength.at(step)
            own = self.recoverer.effect.beta_star if self.recoverer is not None else None
            if self._steer is not None:
                own = self._steer.value
            elif own is not None and isinstance(values.beta_star, float):
                own = max(own, values.beta_star)  # a schedule that has come further goes on
            if own is not None:
                values = self._strength.overridden(own).at(step)
            self._now = step, values
        return self._now[1]

    def sgld_steps(self) -> int:
        """The number of SGLD steps of a sampler call now.

        Raises:
            ConfigError: the usual number was not attached.
        """
        if self._run.sgld_steps is None:
            raise ConfigError(
                "g.sgld_steps needs the usual number of steps: g.attach(sgld_steps=20)."
            )
        self._steps_were_read = True
        usual = self._usual_steps()
        if self._steps is None:
            return usual
        self._steps.base = usual  # which a rollback, also one before a resume, may have changed
        return self._steps.value

    def refinement(self) -> int:
        """In how many finer SGLD steps the adaptive sampler splits each one now; 1 without it."""
        self._is_refined = True
        return self.refined_by

    @property
    def refined_by(self) -> int:
        """The same; 1 where the sampler has not asked, whose steps are all of the usual size."""
        return 1 if self._steps is None or not self._is_refined else self._steps.factor

    def _usual_steps(self) -> int:
        assert self._run.sgld_steps is not None
        factor = self.recoverer.effect.sgld_steps if self.recoverer is not None else 1.0
        return max(1, round(self._run.sgld_steps * factor))

    def steps_for_call(self) -> dict[str, int]:
        """The keyword argument by which the sampler learns the number of its steps; or none."""
        name = self._run.steps_argument
        return {} if name is None else {name: self.sgld_steps()}

    def before_judging(self) -> None:
        """Note in the step's row how many steps the sampler took; the row may change the number."""
        if self._steps_were_read:
            self._journal.note({"sampler/steps": float(self.sgld_steps())})
        if self._steps is not None:
            self._journal.note(
                {
                    "sampler/steps_factor": float(self._steps.factor),
                    "steering/extra_compute": self._steps.extra_compute,
                }
            )

    def before_end_of_step(self) -> None:
        """Note in the step's row what it ran with."""
        if self.recoverer is not None:
            self._journal.note({"recovery/attempt": float(self.recoverer.attempt)})

    def after_step(self) -> None:
        """At a safe point: raise, take a snapshot, or take the run back.

        Raises:
            DivergenceError: an ERROR with ``action="raise"``; with "rollback" where no rollback is
                left.
        """
        if self.recoverer is None:
            self._alarm.safe_point()
            return
        error = self._alarm.take()
        step = self._journal.step
        if error is not None:
            self._journal.write_unjudged()
        rollback = self.recoverer.after_step(
            step,
            self._run,
            judged=step - self._journal.lag,
            error=error,
            active=self._alarm.detector.active,
            beta_star=self._beta_star,
            knows_steps=self._steps_were_read,
            guard_state=self._own_state,
            load_guard_state=self._rewind,
        )
        if rollback is None:
            return
        self._now = None
        least = self.recoverer.effect.beta_star
        if self._steer is not None and least is not None and self._steer.value < least:
            self._steer.move_to(least)  # an older snapshot knows nothing of a former change
        self.recoverer.save_restored(self._run, self._own_state)
        self._monitor.recovery(rollback.record())

    def resume(self) -> int | None:
        """Go on from the newest snapshot on the disk; see :meth:`ebmguard.Guard.resume`."""
        if self.recoverer is None:
            raise ConfigError('g.resume() needs action="rollback" and Recovery(folder=...).')
        return self.recoverer.resume(self._run, self._rewind)

    @property
    def rollbacks(self) -> list[Rollback]:
        """The audit log."""
        return [] if self.recoverer is None else self.recoverer.rollbacks

    def _beta_star(self) -> float | None:
        now = self.strength_at(self._journal.step).beta_star
        if isinstance(now, Tensor):
            return None if now.ndim else float(now)
        return now if isinstance(now, float) else None

    def _own_state(self) -> dict[str, Any]:
        return {**self._journal.state_dict(is_over=False), **self._steering_state()}

    def _rewind(self, state: Mapping[str, Any]) -> None:
        self._journal.load_state_dict(state)
        self._load_steering(state)

    def _observe(self, row: Row) -> None:
        for controller in (self._steps, self._steer):
            if controller is not None:
                controller.observe(row)

    def _steering_state(self) -> dict[str, Any]:
        return {
            "steps": None if self._steps is None else self._steps.state_dict(),
            "beta": None if self._steer is None else self._steer.state_dict(),
        }

    def _load_steering(self, state: Mapping[str, Any]) -> None:
        if self._steps is not None and state["steps"] is not None:
            self._steps.load_state_dict(state["steps"])
        if self._steer is not None and state["beta"] is not None:
            self._steer.load_state_dict(state["beta"])
        self._now = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        recovery = None if self.recoverer is None else self.recoverer.state_dict()
        return {"recovery": recovery, **self._steering_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if self.recoverer is not None and state["recovery"] is not None:
            self.recoverer.load_state_dict(state["recovery"])
        self._load_steering(state)
