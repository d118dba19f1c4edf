"""The parts of a guard, and their state. What they do in a step is :mod:`.step`."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from ..alerts import Judge, Situation, VerdictTracker
from ..alerts.skill import Skill
from ..check import SelfCheck, Setup
from ..errors import ConfigError
from ..ranks import Batch
from ..sinks import Writer
from ..sinks.call_queue import CallQueue
from ..trainer import Trainer
from .actions import Actions
from .calibration import Calibration
from .finer_steps import FinerSteps
from .first_losses import FirstLosses
from .measure import Measure
from .optimizer import OptimizerHooks
from .ownership import Ownership
from .parts import Row
from .rows import Rows
from .sampling import CallLock, Sampling
from .strength import Settings, Strength, StrengthAt, numbers_of
from .watches import UntrainedLosses, UnusedSamples

__all__ = ["Loop", "remove_hooks", "write_the_rest"]

_log = logging.getLogger("ebmguard")


class Loop:
    """The parts, which do not know of one another, and what needs more than one of them.

    Attributes:
        last: the latest row that was read; ``members``: those of an ensemble behind it.
        paused_by: the thread that has paused the guard.
        is_inline: whether the sampler asks for the factor itself.
        latest: the latest strength that was asked for, with what was asked.
    """

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
        self.paused_by: int | None = None
        self.is_inline = False
        self.settings, self.strength = settings, strength
        self.actions, self.writer, self.judge = actions, writer, judge
        self.turns, self.loss_lock = CallQueue(writer.turns.lock), CallLock()
        self.rows = Rows(settings.models, settings.judge_in_loss, settings.block)
        self.calibration, self.first_losses = Calibration(settings), FirstLosses(settings)
        self.hooks: OptimizerHooks | None = None
        self.latest: tuple[object, StrengthAt] | None = None
        self.sampling, self.measure = Sampling(len(settings.models)), Measure(settings)
        rolls_back = settings.action == "rollback"
        self.fineness, self.ownership = fineness, Ownership(self, rolls_back=rolls_back)
        self.verdicts, self.self_check = VerdictTracker(), SelfCheck()
        self.unused, self.untrained = UnusedSamples(), UntrainedLosses()
        self.skill, self.is_closed = Skill(settings.skill), False
        self.hook_refs: list[weakref.ref[OptimizerHooks]] = []
        # Runs at exit too, and so must hold no reference to the guard, nor to what may hold one.
        weakref.finalize(self, _finish, self.rows, writer, self.first_losses, self.hook_refs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Loop:
        """A copy that writes nothing and hangs on nothing, as of a module that holds its guard."""
        copied = memo[id(self)] = Loop.__new__(Loop)
        bare: dict[str, Any] = {"writer": Writer((), flush_every=1), "hooks": None, "hook_refs": []}
        bare["ownership"] = Ownership(copied)
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
        if self.latest is None or self.latest[0] != asked:
            self.latest = asked, self.strength.at(*asked)
        return self.latest[1]

    @property
    def now(self) -> StrengthAt:
        """The values of the present step."""
        return self.strength_at(self.rows.step)

    def energy_parameters(self) -> list[Tensor]:
        """Return the parameters of the energy; if it is unknown, those of the optimizer."""
        return self.sampling.parameters(self.trainer)

    def can_wait(self, batch: Batch) -> bool:
        """Return whether a loss's row can be read later, as no rule can take it for an ERROR."""
        acts = self.fineness.acts or self.strength.is_scheduled or self.actions.pending is not None
        if acts or not self.rows.can_wait or (calm := self.judge.calm) is None:
            return False
        gap, spread, sharpness, sums = self.measure.pulse(batch)
        is_calm = calm[0] < abs(gap) + spread < calm[1] and math.isfinite(sums)
        return is_calm and not sharpness > self.fineness.watched

    @property
    def is_told_steps(self) -> bool:
        """Return whether an optimizer tells that a step is over."""
        return self.hooks is not None and not self.hooks.unended.is_found

    @property
    def situation(self) -> Situation:
        """The state of a run of one model. It reads the device: call it between steps."""
        beta_star = float(self.now.beta_star)
        now = self.actions.situation(self.trainer, beta_star, self.strength.most_raised)
        return self.fineness.known(now, self.rows.step)

    def setup(
        self, now: StrengthAt, example: Tensor | None = None, *, is_running: bool = False
    ) -> Setup:
        """Return what the checks examine, at a step's strength."""
        settings, recoverer, first = self.settings, self.actions.recoverer, self.calibration
        awaits = self.strength.awaits_scale and first.calls_left > 0
        followed: Iterable[str] = ()
        if recoverer is not None and not is_running:
            followed = recoverer.settings.not_followed(self.situation)
        return Setup(
            trainer=self.trainer,
            has_sampler=settings.has_sampler or self.is_inline,
            beta_star=tuple(numbers_of(now.beta_star)),
            output_scale=now.output_scale,
            tempers=self.strength.tempers or awaits,
            measured="" if first.result is None else str(first.result),
            factor=tuple(numbers_of(now.factor)),
            sign=settings.sign,
            action=settings.action if self.actions.acts else "warn",
            judge_in_loss=settings.judge_in_loss,
            has_sinks=bool(self.writer.sinks),
            misses_ranks=settings.ranks.are_unknown,
            models=len(settings.models),
            not_followed=tuple(followed),
            chains="" if recoverer is None else recoverer.chains.feedback,
            unknown=self.self_check.unknown,
            is_stuck=self.self_check.is_stuck,
            is_running=is_running,
            example=example,
        )

    @property
    def _parts(self) -> dict[str, Any]:
        """The parts whose state is the guard's, the judge first, which may refuse one."""
        parts = {"judge": self.judge, "fineness": self.fineness, "skill": self.skill}
        return parts | {"course": self.verdicts, "measure": self.measure}

    def own_state(self, *, is_over: bool = False) -> dict[str, Any]:
        """Return the state that a rollback restores; ``is_over``: the current step ends here."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        parts |= {"measured": self.calibration.state_dict(), "advised": self.actions.advice()}
        return self.rows.state_dict(is_over=is_over) | parts

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`own_state` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.rows.load_state_dict(state)
        self.actions.load_advice(state["advised"])
        self.calibration.load_state_dict(state["measured"])  # last: it is over once it has begun
        self.strength = self.strength.knowing(self.calibration.result, self.rows.step)
        self.latest = None


def remove_hooks(first_losses: FirstLosses, hung: Iterable[weakref.ref[OptimizerHooks]]) -> None:
    """Remove the hooks that hang on others' objects."""
    first_losses.stop()
    for hooks in filter(None, (reference() for reference in hung)):
        hooks.remove()


def write_the_rest(rows: Rows, writer: Writer) -> None:
    """Write the rows that are under way, unjudged."""
    for row in () if writer.is_released else rows.drain():
        writer.write(row.step, row.numbers | row.logged, row.samples)


def _finish(rows: Rows, writer: Writer, *hanging: Any) -> None:
    """Write what a guard had that is gone, and take off what it hung."""
    remove_hooks(*hanging)
    with without_modes():  # the collector may run anywhere, as while torch.compile traces
        write_the_rest(rows, writer)
    writer.close()
