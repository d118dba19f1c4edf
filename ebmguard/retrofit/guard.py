"""The thin stateful shell around the objective, the tempering, the journal and the alarm."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..alerts import Alert
from ..check import Problem, find_problems
from ..energies import Groups, LogQ, Reduce, Variants, check_energies
from ..errors import ConfigError, LossError, SamplerError
from ..objective import coefficients, contrastive_loss
from ..ranks import Ranks
from ..recovery import Recovery, Rollback
from ..steering import AdaptiveSteps, BetaController
from ..tempering.tempering import is_capturing, scale
from .actions import Course
from .alarm import Action, Alarm
from .attached import Attached
from .callables import GuardedLoss, check_takes, wrap_sampler
from .checks import setup_of
from .journal import Journal
from .loss_fn import Difference
from .measure import Meter
from .optimizer import OptimizerHooks
from .rows import Monitor, Row
from .sampling import Sampling
from .strength import Strength, StrengthAt

__all__ = ["Guard", "Options"]

_log = logging.getLogger("ebmguard")

# Sampler calls without any guarded loss after which something is wrong; plots need fewer.
_UNUSED_CALLS = 10
_UNUSED = (
    "The guarded sampler was called %d times, but the guarded loss never: tempered samples then "
    "train an unguarded loss. Use the loss that guard() returned, and draw plots inside "
    "`with g.paused():`."
)
_STATE_VERSION = 4


@dataclass(frozen=True)
class Options:
    """The keywords of every call to the objective."""

    variant: Variants
    reduce: Reduce
    process_group: dist.ProcessGroup | None


class Guard:
    """What :func:`guard` returns; unpacks into ``loss, sampler``.

    Attributes:
        loss_fn: the guarded loss, a callable of ``(f_pos, f_neg, groups=None, log_q=None)``.
        sampler: the guarded sampler, or None.
        attached: what :meth:`attach` was given.
    """

    def __init__(
        self,
        *,
        strength: Strength,
        difference: Difference,
        sampler: object | None,
        methods: Sequence[str],
        model: nn.Module | None,
        sign: int,
        options: Options,
        meter: Meter,
        monitor: Monitor,
        action: Action,
        recovery: Recovery | None,
        adapt: AdaptiveSteps | None,
        steer: BetaController | None,
        on_alert: Callable[[Alert], object] | None,
        hold: bool | None,
    ) -> None:
        self.loss_fn = GuardedLoss(self)
        self.sampler: Any = None if sampler is None else wrap_sampler(self, sampler, methods)
        self.attached = Attached()

        self._strength = strength
        self._difference = difference
        self._sign = sign
        self._options = options
        self._meter = meter
        members = strength.models.numel() if strength.models else 0
        is_first = Ranks(options.process_group).is_first
        self._alarm = Alarm(monitor, action, on_alert, members, speaks=is_first)
        self._journal = Journal(meter, monitor, self._alarm, strength.models, hold)
        self._course = Course(
            strength,
            recovery,
            adapt,
            steer,
            self._alarm,
            self._journal,
            monitor,
            options.process_group,
        )
        self._hooks: OptimizerHooks | None = None
        self._sampling = Sampling(strength, model, meter, self._course)
        self._paused = False
        self._inline = False
        self._has_warned = False
        # Runs at exit too; the monitor holds no reference to the guard.
        weakref.finalize(self, _write_the_rest, monitor)

    def __iter__(self) -> Iterator[Any]:
        yield self.loss_fn
        yield self.sampler

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self._journal.step

    @property
    def last(self) -> Row:
        """The most recent row of diagnostics that reached the host, tag to value.

        Of an ensemble, the means over its members (NaN where any member's is), as the sinks get
        them.
        """
        return self._journal.last

    @property
    def members(self) -> list[Row]:
        """The rows behind :attr:`last`, one for each member of an ensemble.

        In the order of the flattened model dimensions; empty for a single model.
        """
        return self._journal.members

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far, oldest first."""
        return self._alarm.alerts

    @property
    def rollbacks(self) -> list[Rollback]:
        """All rollbacks of this process so far, oldest first: the audit log."""
        return self._course.rollbacks

    @property
    def attempt(self) -> int:
        """How many rollbacks the run has had, those before a resume included."""
        recoverer = self._course.recoverer
        return 0 if recoverer is None else recoverer.attempt

    @property
    def sgld_steps(self) -> int:
        """How many SGLD steps a sampler call should take now, for samplers that ask the guard.

        The number of ``attach(sgld_steps=)``, until a rollback or the adaptive sampler changes it.

        Raises:
            ConfigError: that was not attached.
        """
        return self._course.sgld_steps()

    @property
    def refinement(self) -> int:
        """In how many finer SGLD steps ``adapt=`` splits each one now; 1 without it.

        A sampler that asks for :attr:`sgld_steps` should divide its step size by this number, and
        the standard deviation of its noise by the root of it: the same diffusion, for the same time
        and with the same output scale. A sampler that has lost the data comes back by finer steps,
        not by more of the same size (``docs/results/steering.md``).
        """
        return self._course.refinement()

    def __repr__(self) -> str:
        return f"<ebmguard.Guard step={self.step} alerts={len(self.alerts)}>"

    # -- the loss ---------------------------------------------------------------------------

    def loss(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        groups: Groups | None = None,
        log_q: LogQ | None = None,
    ) -> Tensor:
        """The contrastive loss to minimise, in the place of ``-(f_pos.mean() - f_neg.mean())``.

        Args:
            f_pos: the network's raw output on positives, ``(N,)``, ``(N, 1)`` or ``(N, heads)``;
                ``(*models, N)`` where β* has model dimensions. In the guard's ``convention``.
            f_neg: the same on negatives; M may differ from N.
            groups: class labels ``(y_pos, y_neg)`` of class-conditional chains.
            log_q: log-densities ``(log_q_pos, log_q_neg)``, ``(N,)`` and ``(M,)``, of a proposal
                that knows its own, up to a constant: the weights divide them out (Eq. 6). High
                where the proposal draws often, in either ``convention``; detached. See
                :func:`ebmguard.objective.contrastive_loss`.

        Returns:
            0-dim tensor; with model dimensions, the sum over the models.

        Raises:
            EnergyTypeError, ShapeError: means instead of vectors, integers, shapes that would
                broadcast.
            ConfigError: ``log_q`` at β* = 0, where there are no weights.
            LossError: ``loss_fn`` is not an affine contrastive difference, or a CUDA graph is being
                captured.
            SamplerError: the wrapped sampler has not been called yet.
            DivergenceError: an ERROR is waiting for a safe point that this loop does not have.
        """
        strength = self._enter_loss(f_pos, f_neg, groups, log_q)
        if strength.is_off:
            loss, weight = self._difference.plain(f_pos, f_neg), None
        else:
            loss = contrastive_loss(
                self._upright(f_pos),
                self._upright(f_neg),
                strength.beta_star,
                groups=groups,
                log_q=log_q,
                **vars(self._options),
            )
            weight = self._difference.weight(f_pos, f_neg, self._strength.models)
            if weight is not None:
                loss = weight * loss
        self._observe(f_pos, f_neg, groups, log_q, strength, loss=loss, loss_weight=weight)
        loss = loss.sum() if loss.ndim else loss
        return loss if not self._alarm.is_ringing else _nothing(f_pos) + _nothing(f_neg)

    def reweight(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        groups: Groups | None = None,
        log_q: LogQ | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The energies themselves, whose backward pass applies the weights.

        For loops whose loss line cannot be replaced: put it before that line. Gradients that
        arrive are multiplied by (1 - w⁺_i) and by M · GradScale · w_j (of the ``variant``), so that
        a plain difference of means gets the gradient of the guarded loss.

        Args, Raises: as for :meth:`loss`.
        """
        strength = self._enter_loss(f_pos, f_neg, groups, log_q)
        self._observe(f_pos, f_neg, groups, log_q, strength)
        if self._alarm.is_ringing:
            zero = f_pos.new_zeros(())
            return _scale_gradient(f_pos, zero), _scale_gradient(f_neg, zero)
        if strength.is_off:
            return f_pos, f_neg
        to_pos, to_neg = coefficients(
            self._upright(f_pos),
            self._upright(f_neg),
            strength.beta_star,
            groups=groups,
            log_q=log_q,
            **vars(self._options),
        )
        # Who averages the gradients divides by the number of ranks.
        ranks = Ranks(self._options.process_group).count
        return (
            _scale_gradient(f_pos, -to_pos * (ranks * to_pos.shape[-1])),
            _scale_gradient(f_neg, to_neg * (ranks * to_neg.shape[-1])),
        )

    def _enter_loss(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None, log_q: LogQ | None
    ) -> StrengthAt:
        if is_capturing():
            raise LossError(
                "The guarded loss was called while a CUDA graph is captured; the guard would miss "
                "every replay, and β would stay that of now. Capture the sampler and the network, "
                "and call the guarded loss outside of them at every step."
            )
        if self.sampler is None and self._hooks is None and not self._inline:
            self._alarm.safe_point()  # this loop has no other one
        self._course.require()
        step = self.step + self._loss_begins_step()
        strength = self._course.strength_at(step)
        check_energies(
            f_pos,
            f_neg,
            strength.beta_star,
            variant=self._options.variant,
            groups=groups,
            log_q=log_q,
        )
        if self.sampler is not None and not self._sampling.calls and not self._paused:
            raise SamplerError(
                "The loss was called, but the guarded sampler never was: the negatives come from "
                "elsewhere. Draw them with the sampler that guard() returned (is the name still "
                "bound to the original one?), or pass sampler=None."
            )
        self._difference.check(f_pos, f_neg)
        if step != self.step:
            self._journal.end_step()
        return strength

    def _loss_begins_step(self) -> bool:
        return (
            self._hooks is None
            and self._journal.losses_in_step > 0
            and self.sampler is None
            and not self._inline
            and not self._paused
        )

    def _observe(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        groups: Groups | None,
        log_q: LogQ | None,
        strength: StrengthAt,
        **extra: Tensor | None,
    ) -> None:
        if not self._paused:
            self._course.before_judging()
            f_pos, f_neg = self._upright(f_pos.detach()), self._upright(f_neg.detach())
            self._journal.observe(f_pos, f_neg, groups, log_q, strength, extra)

    def _upright(self, f: Tensor) -> Tensor:
        """The negative energy, high on data, whatever the caller's convention."""
        return f if self._sign > 0 else -f

    # -- the sampler ------------------------------------------------------------------------

    def temper(self, output: Tensor) -> Tensor:
        """``(1 - β) * output``, for samplers that are written inline: ``g.temper(model(x))``.

        Args:
            output: energies inside the sampler's loop.

        Returns:
            a tensor of the same shape and dtype; at β = 0 the very same one.

        Raises:
            SamplerError: not a tensor, called inside a sampler that is guarded already, or while
                a CUDA graph is captured.
            DivergenceError: an ERROR was waiting for this safe point.
        """
        if self._paused:
            return output
        if self._sampling.is_running:
            raise SamplerError(
                "g.temper was called inside a guarded sampler, whose energy would be tempered "
                "twice. Temper inline with guard(loss_fn, None, ...), or leave g.temper out."
            )
        self._inline = True
        self._before_sampling()
        return scale(output, self._course.strength_at(self.step).factor)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block the sampler runs untempered and nothing is recorded: for plots."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _sample(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._paused or self._sampling.is_running:
            return call(*args, **kwargs)
        self._before_sampling()
        strength = self._course.strength_at(self.step)
        result = self._sampling.run(call, args, kwargs, strength, slow=self._journal.is_slow)
        calls = self._sampling.calls
        unused = calls >= _UNUSED_CALLS and not self._journal.losses
        if unused and not strength.is_off and not self._has_warned:
            self._has_warned = True
            _log.warning(_UNUSED, calls)
        return result

    def _before_sampling(self) -> None:
        if is_capturing():
            raise SamplerError(
                "The guard was called inside a sampler that is being captured as a CUDA graph, or "
                "in a capture around it, and would miss every replay: β and the step would stay "
                "those of now. Give it the sampler, guard(loss_fn, sampler, ...), capture and "
                "replay inside that, and call the guarded one at every step."
            )
        if self._hooks is None and self._journal.losses_in_step:
            self._journal.end_step()
        self._alarm.safe_point()

    # -- attaching, state, end --------------------------------------------------------------

    def attach(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        ema: Any = None,
        buffer: Any = None,
        step_size: float | None = None,
        noise_std: float | None = None,
        clamp: tuple[float, float] | None = None,
        generators: Sequence[torch.Generator] | None = None,
        sgld_steps: int | None = None,
        steps_argument: str | None = None,
    ) -> Guard:
        """Tell the guard about the rest of the trainer. Everything here is optional.

        Several calls add up; what is given again replaces what was there.

        Args:
            model: the energy module (as ``model=`` of :func:`guard`).
            optimizer: a step then ends at its ``step()``, and a step whose gradients are not
                finite is skipped: on the device by fused Adam, else at the price of one host read
                per step.
            scaler: the AMP GradScaler around that optimizer; its own skips are reported as INFO.
            scheduler, ema, buffer: the rest of the training state. A buffer is a tensor of rows, a
                list of tensors, or an object with ``state_dict`` and ``load_state_dict``.
            step_size, noise_std, clamp: the sampler's settings.
            generators: sources of random numbers besides the global ones, for rollbacks.
            sgld_steps: the usual number of steps of a sampler call. Then :attr:`sgld_steps` is the
                number to run now, which a rollback or the adaptive sampler may change.
            steps_argument: the sampler's parameter by which it gets that number at every call;
                without it the sampler asks :attr:`sgld_steps`.

        Returns:
            the guard itself.

        Raises:
            ConfigError: an optimizer that trains none of the model's parameters, or a scaler
                without an optimizer.
        """
        attached = self.attached.extended(
            energy=self._sampling.model,
            process_group=self._options.process_group,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            ema=ema,
            buffer=buffer,
            step_size=step_size,
            noise_std=noise_std,
            clamp=clamp,
            generators=generators,
            sgld_steps=sgld_steps,
            steps_argument=steps_argument,
        )
        if attached.steps_argument is not None:
            check_takes(self.sampler, attached.steps_argument)
        self._course.attach(attached)
        if model is not None:
            self._sampling.model = model
        if attached.optimizer is not None:
            if self._hooks is not None:
                self._hooks.remove()
            self._hooks = OptimizerHooks(
                attached.optimizer,
                attached.scaler,
                self._after_optimizer,
                is_watched=lambda: self._journal.is_slow and self._meter.watches_updates,
                on_update=self._meter.saw_update,
                process_group=self._options.process_group,
            )
        self.attached = self._meter.attached = attached
        return self

    def check(self, example: Tensor | None = None) -> list[Problem]:
        """Every problem that can be seen before the first step, the worst first.

        Call it after :meth:`attach`; ``ebmguard.check.show`` prints what it returns. Nothing is
        raised for a problem, and nothing of the trainer is changed.

        Args:
            example: a batch of two or more inputs, as the model gets them. The model is then called
                on it a few times; its buffers and the random generators are put back.

        Returns:
            what was found; empty where all is well.

        Raises:
            ConfigError: the example is not a tensor.
        """
        return find_problems(setup_of(self, example))

    def _after_optimizer(self, skipped: float | Tensor, by_scaler: bool) -> None:
        self._course.before_end_of_step()
        self._journal.end_step_by_optimizer(skipped, by_scaler)
        self._course.after_step()

    def resume(self) -> int | None:
        """Go on from the newest snapshot in ``Recovery(folder=...)``, after everything is attached.

        For a run whose process died. The caller's data iterator is not part of it.

        Returns:
            the step that comes next; None where the folder has no snapshot yet.

        Raises:
            ConfigError: no folder, too little attached, or no snapshot that can be read.
        """
        return self._course.resume()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain numbers, lists and dicts. Take it between steps."""
        # Without an optimizer's word a step is over when its loss is.
        is_over = self._hooks is None and self._journal.losses_in_step > 0
        return {
            "version": _STATE_VERSION,
            "sampler_calls": self._sampling.calls,
            **self._journal.state_dict(is_over=is_over),
            **self._course.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Schedules and options are the constructor's.

        Raises:
            ConfigError: not the state of a guard of this version.
        """
        keys = {"version", "step", "losses", "sampler_calls", "lag", "rows", "meter"}
        keys |= {"detector", "members", "recovery", "steps", "beta"}
        if set(state) != keys or state["version"] != _STATE_VERSION:
            raise ConfigError(
                f"Not a guard's state of version {_STATE_VERSION}: expected the keys "
                f"{', '.join(sorted(keys))}; got {', '.join(sorted(map(str, state)))}."
            )
        self._journal.load_state_dict(state)
        self._course.load_state_dict(state)
        self._sampling.calls = int(state["sampler_calls"])

    def flush(self) -> None:
        """Flush the sinks now."""
        self._journal.flush()

    def close(self) -> None:
        """Judge and write what is still under way, and flush. Rows are written at exit anyway."""
        self._journal.close()


def _write_the_rest(monitor: Monitor) -> None:
    for finished in monitor.drain():
        monitor.write(finished)
    monitor.close()


def _nothing(f: Tensor) -> Tensor:
    """0 with a zero gradient, also where f is NaN."""
    return torch.where(torch.zeros_like(f, dtype=torch.bool), f, 0.0).sum()


def _scale_gradient(f: Tensor, by: Tensor) -> Tensor:
    """f itself; gradients that pass backward are multiplied by ``by``, one factor per sample."""
    by = by.reshape(by.shape + (1,) * (f.ndim - by.ndim))

    def scaled(gradient: Tensor) -> Tensor:
        return torch.where(by == 0, 0.0, gradient * by).to(gradient.dtype)

    same = f.view_as(f)
    if same.requires_grad:
        same.register_hook(scaled)  # type: ignore[no-untyped-call]
    return same
