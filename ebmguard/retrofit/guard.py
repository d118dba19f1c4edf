"""The guard as a trainer sees it: the loss, the sampler, and the parts that you attach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from threading import get_ident
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor
from torch._compile import _disable_dynamo as uncompiled

from ..alerts import Alert, Verdict
from ..check import Problem, find_problems
from ..energies import Groups, LogQ, in_rows
from ..errors import ConfigError, SamplerError, typed, undamaged
from ..ranks import Batch
from ..sampling import Measured, scale
from ..tags import why_not_logged
from ..trainer import Trainer, TrainerParts
from .caller_loss import CallerLoss
from .judging import close, read_all
from .loop import Loop
from .parts import Row
from .sampling import OneLoss, wrap_sampler
from .step import attach_trainer, begin_sampling, loss, reweight, sample
from .strength import checked_trainer

if TYPE_CHECKING:
    from ..recovery import Rollback

__all__ = ["Guard"]

_STATE_VERSION = 13


class Guard:
    """The object that :func:`guard` returns; it unpacks into ``loss, sampler``.

    Attributes:
        loss_fn: the guarded loss, a callable of ``(f_pos, f_neg, groups=None, log_q=None)``.
        sampler: the guarded sampler, or None.
    """

    loss_fn: Any = OneLoss()

    def __init__(
        self, loop: Loop, caller_loss: CallerLoss, sampler: object | None, methods: Sequence[str]
    ) -> None:
        # Not in the loop, which the sampler holds: the caller's loss may hold the sampler.
        self._loop, self._caller_loss = loop, caller_loss
        self.sampler: Any = None
        if sampler is not None:
            self.sampler = wrap_sampler(partial(sample, loop), sampler, methods)

    def __iter__(self) -> Iterator[Any]:
        yield self.loss_fn
        yield self.sampler

    def __repr__(self) -> str:
        return f"<ebmguard.Guard step={self.step} alerts={len(self._loop.actions.alerts)}>"

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self._loop.rows.step

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far, oldest first."""
        read_all(self._loop)
        return self._loop.actions.alerts

    @property
    def trainer(self) -> Trainer:
        """The parts of the trainer that :func:`guard` and :meth:`attach` were given."""
        return self._loop.trainer

    @property
    def last(self) -> Row:
        """The latest row of diagnostics that reached the host, tag to value.

        For an ensemble: means over its members, NaN where a member has NaN.
        """
        read_all(self._loop)
        return self._loop.last

    @property
    def members(self) -> list[Row]:
        """The rows behind ``last``, one for every model, in the order of flattened dimensions."""
        read_all(self._loop)
        return self._loop.members

    @property
    def compute(self) -> Callable[..., Any]:
        """The caller of pure functions of tensors, ``compute(function, *args, **kwargs)``.

        You may replace it, for example by a function that captures CUDA graphs.
        """
        return self._loop.measure.compute

    @compute.setter
    def compute(self, compute: Callable[..., Any]) -> None:
        self._loop.measure.compute = compute

    @property
    def measured(self) -> Measured | None:
        """The sampler's step, noise, output scale and direction, measured at its first calls.

        None before the first call. Its ``verdict`` is "exact", or says why measuring failed.
        """
        return self._loop.calibration.result

    @property
    def verdict(self) -> Verdict:
        """The verdict on the run so far, in one word and one line: see :class:`Verdict`."""
        read_all(self._loop)
        return self._loop.verdicts.verdict

    @property
    def rollbacks(self) -> list[Rollback]:
        """All rollbacks of this process so far, oldest first: the audit log."""
        recoverer = self._loop.actions.recoverer
        return [] if recoverer is None else recoverer.rollbacks

    @property
    def attempt(self) -> int:
        """The number of rollbacks of the run so far, also before a resume."""
        recoverer = self._loop.actions.recoverer
        return 0 if recoverer is None else recoverer.attempt

    @property
    def sgld_steps(self) -> int:
        """The SGLD steps of a sampler call now. A sampler itself asks :meth:`next_steps`.

        Raises a ConfigError if ``sgld_steps=`` was not given.
        """
        return self._loop.actions.steps

    @uncompiled
    def loss(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None = None, log_q: LogQ | None = None
    ) -> Tensor:
        """Return the contrastive loss to minimise, instead of ``-(f_pos.mean() - f_neg.mean())``.

        Args:
            f_pos: the network's raw output on positives, ``(N,)``, ``(N, 1)`` or ``(N, heads)``;
                ``(*models, N)`` where β* has model dimensions. In the guard's ``convention``.
            f_neg: the same on negatives; M may differ from N.
            groups: labels ``(y_pos, y_neg)``, if every chain belongs to a class, a noise level or a
                pair. If output scales differ between levels, add as a third entry the positives'
                scales ``(N,)`` divided by the guard's: see ``docs/codebases.md``. ``"rows"`` for a
                conditional energy f(x, y), with ``f_neg`` of shape ``(N, M)``: row i has the M
                negatives of positive i. A ``loss_fn`` gets ``(N,)`` and ``(N * M,)`` then.
            log_q: log-densities ``(log_q_pos, log_q_neg)``, ``(N,)`` and ``(M,)``, of a proposal
                with a known density, high where it draws often in either ``convention``: see
                :func:`ebmguard.objective.contrastive_loss`.

        Returns:
            0-dim tensor; with model dimensions, the sum over the models.

        Raises:
            EnergyTypeError, ShapeError: means, integers, or shapes that would broadcast.
            ConfigError: ``log_q`` at β* = 0, or a schedule of β* returned an unusable value.
            LossError: ``loss_fn`` is not an affine contrastive difference, the energies do not
                belong to data and the sampler's samples, a CUDA graph is being captured, or
                another thread is inside this guard's loss.
            SamplerError: the wrapped sampler has not been called yet.
            DivergenceError: an ERROR is waiting for a safe point that this loop does not have.
        """
        pos, neg, log_q = in_rows(f_pos, f_neg, groups, log_q)
        return loss(self._loop, self._caller_loss, Batch(pos, neg, groups, log_q))

    @uncompiled
    def reweight(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None = None, log_q: LogQ | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the energies unchanged; their backward pass applies the weights.

        Use it if you cannot replace the loss line: call it before that line, with the arguments of
        :meth:`loss`. It multiplies gradients by (1 - w⁺_i) and by M · GradScale · w_j (of the
        ``variant``), so that a plain difference of means gets the guarded gradient.
        """
        pos, neg, log_q = in_rows(f_pos, f_neg, groups, log_q)
        pos, neg = reweight(self._loop, self._caller_loss, Batch(pos, neg, groups, log_q))
        if groups == "rows":
            return pos.reshape(f_pos.shape), neg.reshape(f_neg.shape)
        return pos, neg

    @uncompiled
    def log(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Put numbers of yours into the row of the step under way.

        Call ``g.log({"accuracy": 0.93, "loss/classification": x})`` before the optimizer's step.
        Every sink, the report and :mod:`ebmguard.runs` show them beside the guard's. If you log a
        name twice in a step, the last number counts. No rule reads them, but for
        that of ``guard(skill=)``. With several ranks, the
        first rank's are written.

        Args:
            numbers: numbers or one-element tensors by name. Tensors on a GPU are read later.

        Raises:
            ConfigError: the guard uses this name, it is no text, or the value is no number.
        """
        candidate: object = numbers
        if not isinstance(candidate, Mapping):
            kind = type(candidate).__name__
            raise ConfigError(f"g.log: a {kind}; expected numbers by name, {{'accuracy': 0.93}}.")
        for name, value in numbers.items():
            if why := why_not_logged(name):
                raise ConfigError(f"g.log: {name!r} is no name for a number of yours: {why}.")
            is_number, kind = isinstance(value, Real), f"a {type(value).__name__}"
            if isinstance(value, Tensor):
                is_number = value.numel() == 1 and not value.is_complex()
                kind = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            if not is_number:
                raise ConfigError(f"g.log: {name!r} is {kind}; expected a number, such as a mean.")
        self._loop.check_open()
        if not self._loop.paused_by:
            self._loop.turns.run(partial(self._loop.rows.log, dict(numbers)))

    @uncompiled
    def next_steps(self) -> int:
        """Return how many SGLD steps your sampler should run now; a rollback may change the number.

        Raises:
            ConfigError: ``sgld_steps=`` was not given.
        """
        self._loop.check_open()
        return self._loop.actions.ask_steps()

    @uncompiled
    def temper(self, output: Tensor) -> Tensor:
        """Return ``(1 - β) * output``, for samplers written inline: ``g.temper(model(x))``.

        Returns:
            a tensor of the output's shape and dtype; at β = 0 the output itself. Several numbers a
            sample, such as logits, keep their values; what flows back to them is multiplied.

        Raises:
            SamplerError: not a tensor, called inside a sampler that is guarded already, or while
                a CUDA graph is captured.
            DivergenceError: an ERROR was waiting for this safe point.
        """
        loop = self._loop
        if loop.paused_by:
            return output
        if loop.sampling.turn.thread is not None:
            raise SamplerError(
                "g.temper was called inside a guarded sampler, whose energy would be tempered "
                "twice. Temper inline with guard(loss_fn, None, ...), or leave g.temper out."
            )
        loop.is_inline = True
        begin_sampling(loop)
        factor = loop.now.factor_of_samples
        return scale(output, factor, len(loop.settings.models))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a block where the sampler runs untempered and nothing is recorded, as for plots."""
        before = self._loop.paused_by
        try:
            self._loop.paused_by = get_ident()
            yield
        finally:
            self._loop.paused_by = before

    def attach(self, **parts: Unpack[TrainerParts]) -> Guard:
        """Give the guard parts of the trainer that you made after it; returns the guard.

        You may call it several times: a new part replaces the earlier one. The keywords are those
        of :func:`guard` for the rest of the trainer (:class:`ebmguard.trainer.TrainerParts`);
        here ``step_size`` and ``noise_std`` leave the output scale as it is. It reopens a guard.

        Raises:
            TypeError: an unknown keyword.
            ConfigError: a part that does not fit, such as an optimizer that trains none of the
                model's parameters. Nothing has changed then.
        """
        loop = self._loop
        trainer = checked_trainer(loop.trainer, parts, self.sampler)
        loop.ownership.take(trainer, self.sampler)
        if loop.is_closed:
            loop.writer.claim()
            loop.is_closed = loop.ownership.is_over = False
        attach_trainer(loop, trainer)
        return self

    @typed
    def check(self, example: Tensor | None = None) -> list[Problem]:
        """Find the problems that show before the first step; the worst come first.

        Call it when everything is attached; ``ebmguard.check.show`` prints what it returns. The
        trainer stays as it was.

        Args:
            example: a batch of two or more inputs, as the model gets them. The model is then called
                on it a few times; its buffers and the random generators are put back.

        Raises:
            ConfigError: the example is not a tensor.
        """
        return find_problems(self._loop.setup(self._loop.now, example))

    def resume(self) -> int | None:
        """Go on from the newest snapshot in ``Recovery(folder=...)``, after everything is attached.

        If it is damaged or of another run, the one before is used, with a warning.

        Returns:
            the number of the next step; None if the folder has no snapshot yet.

        Raises:
            ConfigError: no folder, too little attached, or no snapshot that can be read and fits
                (the first difference is named). The run is then as it was.
        """
        loop, recoverer = self._loop, self._loop.actions.recoverer
        if recoverer is None:
            raise ConfigError("g.resume() needs recovery=Recovery(folder=...).")
        loop.check_open()
        step = recoverer.resume(loop.trainer, loop.own_state, loop.load_own_state)
        if step is not None:
            loop.writer.rewind(step, recoverer.attempt)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain numbers, lists, dicts. Take it between steps."""
        loop, recoverer = self._loop, self._loop.actions.recoverer
        read_all(loop)
        # Without an optimizer's word a step is over when its loss is.
        is_over = not loop.is_told_steps and loop.rows.losses_in_step > 0
        with loop.turns.lock:  # another thread waits for a whole row
            return {
                "version": _STATE_VERSION,
                "sampler_calls": loop.sampling.calls,
                "recovery": None if recoverer is None else recoverer.state_dict(),
                **loop.own_state(is_over=is_over),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Schedules and options are the constructor's.

        Raises:
            ConfigError: the state of another version, or damaged. The guard is as it was.
        """
        loop, recoverer = self._loop, self._loop.actions.recoverer
        loop.check_open()
        before = self.state_dict()
        try:
            with undamaged("a guard"):
                if set(state) != set(before) or state["version"] != _STATE_VERSION:
                    raise ConfigError(
                        f"Not a guard's state of version {_STATE_VERSION}: expected the keys "
                        f"{', '.join(sorted(before))}; got {', '.join(sorted(map(str, state)))}."
                    )
                calls = int(state["sampler_calls"])
                loop.load_own_state(state)
                if recoverer is not None and state["recovery"] is not None:
                    recoverer.load_state_dict(state["recovery"])
                loop.sampling.calls = calls
        except ConfigError:
            loop.load_own_state(before)
            raise

    def flush(self) -> None:
        """Flush the sinks now."""
        read_all(self._loop)
        self._loop.writer.flush()

    def close(self) -> None:
        """Take the guard out of use: judge and write what is under way, and free ``log_dir``.

        This removes its hooks from the optimizer, the scaler and the modules. From then on the
        loss, the sampler and other calls of a step raise a ConfigError, except inside
        ``with g.paused():``. A guard that is no longer referenced closes itself.
        """
        close(self._loop)
