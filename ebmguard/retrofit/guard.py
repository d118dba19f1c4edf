"""The guard as a trainer sees it: the loss, the sampler, and what it is told."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..alerts import Alert, Judge
from ..check import Problem, Setup, find_problems
from ..energies import Groups, LogQ, check_energies
from ..errors import ConfigError, LossError, SamplerError
from ..objective import trusted
from ..recovery import Rollback
from ..samplers import Mixture
from ..shards import check_shards
from ..sinks import Writer
from ..tempering import is_capturing, scale
from ..trainer import Clamp, Trainer
from .actions import Actions, SgldSteps
from .callables import GuardedLoss, check_takes, wrap_sampler
from .loop import Loop, write_the_rest
from .loss_fn import CallerLoss, no_gradient, scaled_gradient
from .optimizer import OptimizerHooks
from .rows import Row, Rows
from .sampling import Sampling
from .settings import Settings
from .strength import Strength, StrengthAt

__all__ = ["Guard", "check_told"]

_log = logging.getLogger("ebmguard")

# Sampler calls without any guarded loss after which something is wrong; plots need fewer.
_UNUSED_CALLS = 10
_UNUSED = (
    "The guarded sampler was called %d times, but the guarded loss never: tempered samples then "
    "train an unguarded loss. Use the loss that guard() returned, and draw plots inside "
    "`with g.paused():`."
)
_STATE_VERSION = 5


class Guard:
    """What :func:`guard` returns; unpacks into ``loss, sampler``.

    Attributes:
        loss_fn: the guarded loss, a callable of ``(f_pos, f_neg, groups=None, log_q=None)``.
        sampler: the guarded sampler, or None.
    """

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
        self.loss_fn = GuardedLoss(self)
        self.sampler: Any = None if sampler is None else wrap_sampler(self, sampler, methods)
        self._settings = settings
        self._strength = strength
        self._caller_loss = caller_loss
        self._sampling = Sampling(None, settings.models, tempers=strength.tempers)
        self._loop = Loop(settings, strength, judge, actions, writer)
        self._actions = actions
        self._hooks: OptimizerHooks | None = None
        self._is_paused = False
        self._is_inline = False
        self._has_warned = False
        self._in_loss = threading.Lock()
        # Runs at exit too, and so must hold no reference to the guard.
        weakref.finalize(self, _finish, self._loop.rows, writer)

    def __iter__(self) -> Iterator[Any]:
        yield self.loss_fn
        yield self.sampler

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self._loop.rows.step

    @property
    def trainer(self) -> Trainer:
        """What :func:`guard` and :meth:`attach` were told of the rest of the trainer."""
        return self._loop.trainer

    @property
    def last(self) -> Row:
        """The most recent row of diagnostics that reached the host, tag to value.

        Of an ensemble, the means over its members (NaN where any member's is), as the sinks get
        them.
        """
        return self._loop.last

    @property
    def members(self) -> list[Row]:
        """The rows behind :attr:`last`, one for each member of an ensemble.

        In the order of the flattened model dimensions; empty for a single model.
        """
        return self._loop.members

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far, oldest first."""
        return self._actions.alerts

    @property
    def rollbacks(self) -> list[Rollback]:
        """All rollbacks of this process so far, oldest first: the audit log."""
        recoverer = self._actions.recoverer
        return [] if recoverer is None else recoverer.rollbacks

    @property
    def attempt(self) -> int:
        """How many rollbacks the run has had, those before a resume included."""
        recoverer = self._actions.recoverer
        return 0 if recoverer is None else recoverer.attempt

    @property
    def sgld_steps(self) -> int:
        """How many SGLD steps a sampler call takes now; a sampler asks :meth:`next_steps`.

        The number of ``attach(sgld_steps=)``, until a rollback or the adaptive sampler changes it.

        Raises:
            ConfigError: that was not attached.
        """
        return self._actions.steps.steps

    @property
    def refinement(self) -> int:
        """In how many finer SGLD steps ``adapt=`` splits each one now; 1 without it."""
        return self._actions.refinement

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
        """The contrastive loss to minimise, instead of ``-(f_pos.mean() - f_neg.mean())``.

        Not for several threads at once: losses belong to the steps of one training loop.

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
            ConfigError: ``log_q`` at β* = 0, where there are no weights; a schedule of β* that
                returned what cannot be used.
            LossError: ``loss_fn`` is not an affine contrastive difference, a CUDA graph is being
                captured, or another thread is inside this guard's loss.
            SamplerError: the wrapped sampler has not been called yet.
            DivergenceError: an ERROR is waiting for a safe point that this loop does not have.
        """
        with self._one_thread():
            strength = self._begin_loss(f_pos, f_neg, groups, log_q)
            weight = None
            if strength.is_off:
                loss = self._caller_loss.plain(f_pos, f_neg)
            else:
                loss = trusted.contrastive_loss(
                    self._upright(f_pos),
                    self._upright(f_neg),
                    strength.beta_star,
                    groups=groups,
                    log_q=log_q,
                    **self._settings.objective,
                )
                weight = self._caller_loss.weight(f_pos, f_neg, self._settings.models)
                if weight is not None:
                    loss = weight * loss
            extra = {"loss": loss, "loss_weight": weight}
            self._take_loss(f_pos, f_neg, strength, groups, log_q, extra)
            if self._actions.is_pending:
                return no_gradient(f_pos) + no_gradient(f_neg)
            return loss.sum() if loss.ndim else loss

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
        with self._one_thread():
            strength = self._begin_loss(f_pos, f_neg, groups, log_q)
            self._take_loss(f_pos, f_neg, strength, groups, log_q, {})
            if self._actions.is_pending:
                zero = f_pos.new_zeros(())
                return scaled_gradient(f_pos, zero), scaled_gradient(f_neg, zero)
            if strength.is_off:
                return f_pos, f_neg
            to_pos, to_neg = trusted.coefficients(
                self._upright(f_pos),
                self._upright(f_neg),
                strength.beta_star,
                groups=groups,
                log_q=log_q,
                **self._settings.objective,
            )
            # Whoever averages the gradients divides by the number of ranks.
            ranks = self._settings.ranks.count
            return (
                scaled_gradient(f_pos, -to_pos * (ranks * to_pos.shape[-1])),
                scaled_gradient(f_neg, to_neg * (ranks * to_neg.shape[-1])),
            )

    def _begin_loss(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None, log_q: LogQ | None
    ) -> StrengthAt:
        """Refuse what cannot be meant before anything changes; then end the step before."""
        if is_capturing():
            raise LossError(
                "The guarded loss was called while a CUDA graph is captured; the guard would miss "
                "every replay, and β would stay that of now. Capture the sampler and the network, "
                "and call the guarded loss outside of them at every step."
            )
        alone = self.sampler is None and self._hooks is None and not self._is_inline
        if alone:
            self._loop.raise_pending()  # this loop has no other safe point
        self._actions.check_ready(self.trainer)
        # Where nothing else tells that a step is over, the next loss does.
        begins = alone and self._loop.rows.losses_in_step > 0 and not self._is_paused
        strength = self._loop.strength_at(self.step + begins)
        check_energies(
            f_pos,
            f_neg,
            strength.beta_star,
            variant=self._settings.variant,
            groups=groups,
            log_q=log_q,
        )
        if self.sampler is not None and not self._sampling.calls and not self._is_paused:
            raise SamplerError(
                "The loss was called, but the guarded sampler never was: the negatives come from "
                "elsewhere. Draw them with the sampler that guard() returned (is the name still "
                "bound to the original one?), or pass sampler=None."
            )
        self._caller_loss.check(f_pos, f_neg)
        if begins:
            self._loop.end_step()
        return strength

    def _take_loss(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        strength: StrengthAt,
        groups: Groups | None,
        log_q: LogQ | None,
        extra: Mapping[str, Tensor | None],
    ) -> None:
        if not self._is_paused:
            pos, neg = self._upright(f_pos.detach()), self._upright(f_neg.detach())
            self._loop.take_loss(pos, neg, strength, groups, log_q, extra)

    def _upright(self, f: Tensor) -> Tensor:
        """The negative energy, high on data, whatever the caller's convention."""
        return f if self._settings.sign > 0 else -f

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        if not self._in_loss.acquire(blocking=False):
            raise LossError(
                "The guarded loss was called while another call of it was under way: from a second "
                "thread, or inside loss_fn or on_alert. Losses belong to the steps of one training "
                "loop; give every thread a guard of its own."
            )
        try:
            yield
        finally:
            self._in_loss.release()

    # -- the sampler ------------------------------------------------------------------------

    def next_steps(self) -> SgldSteps:
        """What the next sampler call should run: the number of steps, and how much finer they are.

        For samplers that ask the guard; asking means following. A sampler that has lost the data
        comes back by finer steps, not by more of the same size (``docs/results/steering.md``).

        Returns:
            ``(steps, refinement)``: run ``steps`` steps, the step size divided by ``refinement``
            and the standard deviation of the noise by the root of it.

        Raises:
            ConfigError: the usual number was not attached.
        """
        return self._actions.ask_steps(for_refinement=True)

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
        if self._is_paused:
            return output
        if self._sampling.is_running:
            raise SamplerError(
                "g.temper was called inside a guarded sampler, whose energy would be tempered "
                "twice. Temper inline with guard(loss_fn, None, ...), or leave g.temper out."
            )
        self._is_inline = True
        self._begin_sampling()
        return scale(output, self._loop.strength_at(self.step).factor)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block the sampler runs untempered and nothing is recorded: for plots."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _sample(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a sampler on the tempered energy; what :attr:`sampler` does when it is called."""
        if self._is_paused or self._sampling.is_running:
            return call(*args, **kwargs)
        self._begin_sampling()
        strength, slow, actions = (
            self._loop.strength_at(self.step),
            self._loop.rows.is_slow,
            self._actions,
        )
        if self.trainer.steps_argument is not None:
            steps = actions.ask_steps(for_refinement=False)
            kwargs = {**kwargs, self.trainer.steps_argument: steps.steps}
        result, tempering = self._sampling.run(
            call, args, kwargs, strength.factor, remember=slow and self.trainer.knows_steps
        )
        self._loop.measure.samples(
            self.trainer,
            tempering,
            result,
            slow=slow,
            refinement=actions.refined_by,
            parts=call.parts if isinstance(call, Mixture) else None,
        )
        unused = self._sampling.calls >= _UNUSED_CALLS and not self._loop.rows.losses
        if unused and not strength.is_off and not self._has_warned:
            self._has_warned = True
            _log.warning(_UNUSED, self._sampling.calls)
        return result

    def _begin_sampling(self) -> None:
        if is_capturing():
            raise SamplerError(
                "The guard was called inside a sampler that is being captured as a CUDA graph, or "
                "in a capture around it, and would miss every replay: β and the step would stay "
                "those of now. Give it the sampler, guard(loss_fn, sampler, ...), capture and "
                "replay inside that, and call the guarded one at every step."
            )
        if self._hooks is None and self._loop.rows.losses_in_step:
            self._loop.end_step()
        self._loop.raise_pending()

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
        clamp: Clamp | None = None,
        generators: Sequence[torch.Generator] | None = None,
        sgld_steps: int | None = None,
        steps_argument: str | None = None,
    ) -> Guard:
        """Tell the guard about parts of the trainer that were made after it. All are optional.

        Several calls add up; what is given again replaces what was there. The arguments are those
        of :func:`guard`; here, ``step_size`` and ``noise_std`` leave the output scale as it is.

        Returns:
            the guard itself.

        Raises:
            ConfigError: what cannot be meant, such as an optimizer that trains none of the model's
                parameters, or a clamp whose ends are the wrong way round. Nothing has changed then.
        """
        told = {name: value for name, value in locals().items() if name != "self"}
        trainer = check_told(self.trainer, told, self._settings, self.sampler, self._sampling.model)
        self._actions.attach(trainer)
        if model is not None:
            self._sampling.model = model
        if trainer.optimizer is not None:
            if self._hooks is not None:
                self._hooks.remove()
            self._hooks = OptimizerHooks(
                trainer.optimizer,
                trainer.scaler,
                self._loop.end_step_by_optimizer,
                # What the optimizer does to the members of an ensemble cannot be told apart.
                is_watched=lambda: self._loop.rows.is_slow and not self._settings.models,
                on_update=self._loop.measure.update,
                process_group=self._settings.process_group,
            )
        self._loop.trainer = trainer
        return self

    def check(self, example: Tensor | None = None) -> list[Problem]:
        """Every problem that can be seen before the first step, the worst first.

        Call it when everything is attached; ``ebmguard.check.show`` prints what it returns. Nothing
        is raised for a problem, and nothing of the trainer is changed.

        Args:
            example: a batch of two or more inputs, as the model gets them. The model is then called
                on it a few times; its buffers and the random generators are put back.

        Returns:
            what was found; empty where all is well.

        Raises:
            ConfigError: the example is not a tensor.
        """
        if example is not None and not isinstance(example, Tensor):
            raise ConfigError(
                f"g.check: example= is a {type(example).__name__}; expected a batch of inputs, a "
                "tensor, as the model gets them."
            )
        settings, strength = self._settings, self._loop.strength_at(self.step)
        setup = Setup(
            trainer=self.trainer,
            model=self._sampling.model,
            has_sampler=self.sampler is not None or self._is_inline,
            beta_star=_numbers(strength.beta_star),
            output_scale=settings.output_scale,
            tempers=self._strength.tempers,
            factor=_numbers(strength.factor),
            sign=settings.sign,
            action=settings.action,
            judge_in_loss=settings.judge_in_loss,
            has_sinks=bool(self._loop.writer.sinks),
            is_distributed=dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size() > 1,
            joins_ranks=settings.process_group is not None,
            models=len(settings.models),
            example=example,
        )
        return find_problems(setup)

    def resume(self) -> int | None:
        """Go on from the newest snapshot in ``Recovery(folder=...)``, after everything is attached.

        For a run whose process died. The caller's data iterator is not part of it.

        Returns:
            the step that comes next; None where the folder has no snapshot yet.

        Raises:
            ConfigError: no folder, too little attached, or no snapshot that can be read.
        """
        return self._loop.resume()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain numbers, lists and dicts. Take it between steps."""
        # Without an optimizer's word a step is over when its loss is.
        is_over = self._hooks is None and self._loop.rows.losses_in_step > 0
        return {
            "version": _STATE_VERSION,
            "sampler_calls": self._sampling.calls,
            **self._loop.own_state(is_over=is_over),
            **self._actions.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Schedules and options are the constructor's.

        Raises:
            ConfigError: not the state of a guard of this version.
        """
        keys = {"version", "step", "losses", "sampler_calls", "lag", "rows", "measure", "judge"}
        keys |= {"recovery", "steps", "beta"}
        if set(state) != keys or state["version"] != _STATE_VERSION:
            raise ConfigError(
                f"Not a guard's state of version {_STATE_VERSION}: expected the keys "
                f"{', '.join(sorted(keys))}; got {', '.join(sorted(map(str, state)))}."
            )
        self._loop.load_own_state(state)
        self._actions.load_state_dict(state)
        self._sampling.calls = int(state["sampler_calls"])

    def flush(self) -> None:
        """Flush the sinks now."""
        self._loop.writer.flush()

    def close(self) -> None:
        """Judge and write what is still under way, flush, and let another guard use ``log_dir``.

        Rows are written at exit anyway.
        """
        self._loop.close()


def check_told(
    trainer: Trainer,
    told: Mapping[str, Any],
    settings: Settings,
    sampler: object,
    energy: nn.Module | None = None,
) -> Trainer:
    """A trainer and what the guard is told of it now.

    Args:
        trainer: as far as it is known.
        told: arguments of :meth:`Guard.attach`.
        settings: of the guard.
        sampler: the sampler, guarded or not.
        energy: the energy module, where the guard knows one.

    Raises:
        ConfigError: what cannot be meant.
    """
    trainer = trainer.extended(energy=energy, **told)
    if trainer.optimizer is not None:
        trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        check_shards(trained, settings.process_group)
    if trainer.steps_argument is not None:
        check_takes(sampler, trainer.steps_argument)
    return trainer


def _finish(rows: Rows, writer: Writer) -> None:
    write_the_rest(rows, writer)
    writer.close()


def _numbers(value: float | Tensor | tuple[float | Tensor, ...]) -> tuple[float, ...]:
    """Read on the host: a check comes before the first step, and nothing is waiting."""
    if isinstance(value, tuple):
        return tuple(number for each in value for number in _numbers(each))
    if isinstance(value, Tensor):
        return tuple(float(each) for each in value.flatten().tolist())
    return (float(value),)
