"""What happens in a step of training, and in which order.

- :func:`sample`, the sampler's call: the step before ends, unless its optimizer has ended it; an
  ERROR that waits acts; the sampler runs on the tempered energy; what it showed is measured.
- :func:`loss`: the loss is checked, computed and measured; its row is judged at once, or waits.
- :func:`stepped`, the optimizer's step: rows that are due are judged and written; an ERROR acts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as uncompiled

from ..energies import per_sample, widened
from ..errors import LossError, SamplerError
from ..ranks import Batch, whole_batch
from ..sampling import Recording, is_capturing
from ..trainer import Trainer
from .caller_loss import CallerLoss
from .ensemble import check_models
from .judging import follow, keep_or_roll_back, raise_pending, read_all
from .loop import Loop
from .optimizer import OptimizerHooks
from .sampling import CAPTURED, OTHER_THREAD
from .strength import StrengthAt

__all__ = ["attach_trainer", "begin_sampling", "loss", "reweight", "sample", "stepped"]

T = TypeVar("T")
_UNDER_WAY = (
    "The guarded loss was called while another call of it was under way: from a second "
    "thread, or inside loss_fn or on_alert. Losses belong to the steps of one training "
    "loop; give every thread a guard of its own."
)
_CAPTURED = (
    "The guarded loss was called while a CUDA graph is captured; the guard would miss "
    "every replay, and β would stay that of now. Capture the sampler and the network, "
    "and call the guarded loss outside of them at every step."
)
_NEVER_SAMPLED = (
    "The loss was called, but the guarded sampler never was: the negatives come from "
    "elsewhere. Draw them with the sampler that guard() returned (is the name still "
    "bound to the original one?), or pass sampler=None."
)


def sample(loop: Loop, call: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Run the sampler on the tempered energy, and return its result."""
    if get_ident() in (loop.sampling.turn.thread, loop.paused_by):
        return call(*args, **kwargs)
    return loop.sampling.turn.run(partial(_sample, loop, call, args, kwargs))


def _sample(
    loop: Loop, call: Callable[..., Any], args: Sequence[Any], kwargs: Any, is_free: bool
) -> Any:
    if loop.paused_by or not is_free:
        if loop.now.must_temper:
            raise SamplerError(OTHER_THREAD)
        return call(*args, **kwargs)
    begin_sampling(loop)
    now, trainer, recoverer = loop.now, loop.trainer, loop.actions.recoverer
    slow = loop.rows.is_slow  # before the call, in which a step may end
    if (name := trainer.steps_argument) is not None:
        args, kwargs = loop.actions.with_steps(name, call, args, kwargs)
    if recoverer is not None:
        recoverer.chains.enter(call, args, kwargs, trainer.buffer)
    parts = call, trainer.model, *args, *kwargs.values()
    attempt = 0 if recoverer is None else recoverer.attempt
    finer = loop.fineness.of_call(loop.rows.step, attempt, parts)
    calibration, finds_moves = loop.calibration, finer is not None and finer.moves is None
    was_calibrating = calibration.calls_left > 0
    drift = loop.fineness.drift(finer) if finds_moves else calibration.drift(parts, now, finer)
    recording: Recording | None = drift
    if recording is None and slow and trainer.steps is not None:
        recording = Recording(ends=2, has_draws=False)
    inputs = call, args, kwargs, trainer, loop.strength, now, recording, finer
    result, tempering = loop.sampling.run(*inputs)
    if recoverer is not None:
        recoverer.chains.leave(result)
    if drift is not None:
        calibration.take(drift, tempering, result)
        if finds_moves:
            loop.fineness.looked(drift, result)
    if was_calibrating:
        _take_output_scale(loop, now)
    loop.first_losses.sampled(tempering, result, parts, calibration)
    last = () if recording is None else recording.evaluations[-2:]
    seen, sizes = (trainer, tempering, result, last, finer), trainer.steps or calibration.sizes
    loop.measure.sampled(*seen, sizes=sizes, slow=slow)
    acts, tempers, sets = not now.is_off, now.must_temper, loop.actions.sets_steps
    loop.unused.sample(tempering, result, sets=sets, acts=acts, tempers=tempers)
    return result


def begin_sampling(loop: Loop) -> None:
    """A sampler call begins, or an inline one asks for the factor: a safe point."""
    if is_capturing():
        raise SamplerError(CAPTURED)
    loop.check_open()
    if loop.hooks is not None:
        loop.hooks.finish()
    # Where no optimizer tells that a step is over, the next sampler call does.
    if not loop.is_told_steps and loop.rows.losses_in_step:
        follow(loop, loop.rows.end_step)
    raise_pending(loop)
    loop.actions.begin(loop.rows.step, loop.trainer, loop.own_state)


def _take_output_scale(loop: Loop, now: StrengthAt) -> None:
    """Take what the call has shown of the output scale, and report a wrong one."""
    acts = loop.strength.is_scheduled or not now.is_off
    strength, alerts = loop.calibration.compared(loop.strength, loop.rows.step, acts=acts)
    if strength is not loop.strength:
        loop.strength, loop.latest = strength, None
    loop.actions.alerts += alerts
    loop.writer.write_alerts([alert.record() for alert in alerts])
    loop.actions.report(alerts)


def loss(loop: Loop, caller_loss: CallerLoss, batch: Batch) -> Tensor:
    """See :meth:`ebmguard.Guard.loss`."""
    return loop.loss_lock.run(
        partial(_one_loss, loop, caller_loss, partial(_loss, loop, caller_loss), batch)
    )


def reweight(loop: Loop, caller_loss: CallerLoss, batch: Batch) -> tuple[Tensor, Tensor]:
    """See :meth:`ebmguard.Guard.reweight`."""
    return loop.loss_lock.run(
        partial(_one_loss, loop, caller_loss, partial(_reweight, loop), batch)
    )


def _one_loss(
    loop: Loop,
    caller_loss: CallerLoss,
    call: Callable[[Batch, StrengthAt, bool], T],
    batch: Batch,
    is_free: bool,
) -> T:
    """Let one thread in and call; record nothing of a loss that cannot train, a validation's.

    Energies that never had a gradient are recorded where gradients are enabled.
    """
    if not is_free:
        raise LossError(_UNDER_WAY)
    untrained, is_paused = loop.untrained, loop.paused_by is not None
    trains = any(getattr(f, "requires_grad", False) for f in batch[:2])
    rests = not torch.is_grad_enabled() or (untrained.has_trained and not trains)
    is_quiet = is_paused or rests  # it leaves no trace
    strength = _begin_loss(loop, caller_loss, batch, is_quiet)
    result = call(batch, strength, is_quiet)
    if not is_quiet:
        untrained.has_trained |= trains
    elif not (is_paused or loop.rows.losses):
        untrained.watch(loop.energy_parameters)
    return result


def _begin_loss(loop: Loop, caller_loss: CallerLoss, batch: Batch, is_quiet: bool) -> StrengthAt:
    """Refuse what cannot be meant before anything changes; then end the step before."""
    loop.check_open()
    if is_capturing():
        raise LossError(_CAPTURED)
    begins_step = False
    if not is_quiet:
        _check_steps(loop)
        # Where nothing else tells that a step is over, the next loss does.
        losses_end_steps = not (loop.settings.has_sampler or loop.is_inline or loop.is_told_steps)
        if losses_end_steps:
            raise_pending(loop)  # this loop has no other safe point
        loop.actions.check_ready(loop.trainer, is_shared=loop.ownership.is_shared)
        begins_step = losses_end_steps and loop.rows.losses_in_step > 0
    strength, is_first = loop.strength_at(loop.rows.step + begins_step), not loop.sampling.calls
    if not strength.is_off:
        loop.strength.check_known(loop.calibration.result)
    check_models(loop.settings.models, loop.settings.variant, batch, strength.beta_star)
    if loop.settings.has_sampler and is_first and not is_quiet:
        raise SamplerError(_NEVER_SAMPLED)
    caller_loss.check(*batch[:2])
    if not is_quiet:
        measured, is_off = loop.calibration.result, strength.is_off
        scale = loop.strength.output_scale if loop.strength.is_measured else None
        loop.first_losses.check(*batch[:2], measured, only_warns=is_off, scale=scale)
        if not loop.ownership.began:
            loop.ownership.begin([*loop.sampling.temperings])
        loop.actions.begin(loop.rows.step, loop.trainer, loop.own_state)
    if begins_step:
        follow(loop, loop.rows.end_step)
        return loop.now  # which that row may have steered
    return strength


def _loss(
    loop: Loop, caller_loss: CallerLoss, batch: Batch, strength: StrengthAt, is_quiet: bool
) -> Tensor:
    sides = batch[:2]
    if not is_quiet:
        loop.first_losses.check_gradients(*sides, loop.rows.step, only_warns=strength.is_off)
    plain = weight = None
    if strength.is_off:
        plain = caller_loss.plain(*sides)
    else:
        weight = caller_loss.weight(*sides, loop.settings.models)
    value = _compute_and_record(loop, batch, strength, is_quiet, plain, weight)
    assert value is not None
    value = value.sum() if value.ndim else value
    if loop.actions.pending and (value.requires_grad or not is_quiet):
        return _without_gradient(value, *sides)
    loop.calibration.watch(value, loop.trainer.optimizer)
    return value


def _reweight(
    loop: Loop, batch: Batch, strength: StrengthAt, is_quiet: bool
) -> tuple[Tensor, Tensor]:
    f_pos, f_neg = batch[:2]
    if not torch.is_grad_enabled():
        return f_pos, f_neg
    # In float32 at least: the factors have digits that half precision would lose.
    pos, neg = (widened(f.detach()).requires_grad_() for f in (f_pos, f_neg))
    with torch.enable_grad():
        value = _compute_and_record(loop, batch._replace(f_pos=pos, f_neg=neg), strength, is_quiet)
    if loop.actions.pending:
        zero = f_pos.new_zeros(())
        return _scaled_gradient(f_pos, zero), _scaled_gradient(f_neg, zero)
    if value is None:
        return f_pos, f_neg
    to_pos, to_neg = torch.autograd.grad(value.sum(), (pos, neg))
    sign, n = loop.settings.sign, len(loop.settings.models)
    return (
        _scaled_gradient(f_pos, to_pos * (-sign * f_pos.shape[n])),
        _scaled_gradient(f_neg, to_neg * (sign * f_neg.shape[n])),
    )


def _compute_and_record(
    loop: Loop,
    batch: Batch,
    strength: StrengthAt,
    is_quiet: bool,
    plain: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor | None:
    """Compute the loss times its weight, ``plain`` at β* = 0, and put it into the row.

    The row is read at once, or waits for others where nothing in it is alarming.
    """
    settings, rows = loop.settings, loop.rows
    if not is_quiet:
        loop.unused.loss()
        if loop.actions.asks_steps:
            rows.note({"sampler/steps": float(loop.actions.steps)})
    slow = not is_quiet and rows.begin_loss(is_on_host=not batch.f_pos.is_cuda)
    pos, neg = batch.f_pos, batch.f_neg
    if strength.is_off:  # nothing of what follows may touch the graph of the caller's loss
        pos, neg = pos.detach(), neg.detach()
    one_each = widened if settings.models else per_sample
    pos, neg = one_each(pos), one_each(neg)
    if settings.sign < 0:
        pos, neg = -pos, -neg
    batch = batch._replace(f_pos=pos, f_neg=neg)
    if settings.process_group is not None:
        star = "off" if strength.is_off else strength.beta_star
        batch = whole_batch(settings.process_group, batch, same=(star, settings.variant))
    value, numbers = loop.measure.computed(batch, strength)
    shown: dict[str, Tensor] = {}
    if value is None:
        value = plain
    elif weight is not None:
        value, shown = weight * value, {"loss_weight": weight}
    if value is not None:
        shown = {"loss": value, **shown}
    if not is_quiet:
        rows.waits = loop.can_wait(batch)
        inputs = loop.trainer, batch, strength, numbers, shown
        call, samples = loop.measure.loss(*inputs, slow=slow, is_pooled=rows.is_pooled)
        loop.turns.run(partial(rows.add, call, samples))
        if not rows.waits:
            read_all(loop)
    return value


def _without_gradient(value: Tensor, *sides: Tensor) -> Tensor:
    """Return the loss with a zero gradient, also for NaN energies; NaN where all of a side are."""
    value = value.detach()
    for f in sides:
        value = torch.where(f.detach().isfinite().any(), value, torch.nan)
        value = value + torch.where(torch.zeros_like(f, dtype=torch.bool), f, 0.0).sum()
    return value


def _scaled_gradient(f: Tensor, factors: Tensor) -> Tensor:
    """Return f itself, and multiply the gradients that pass backward by a factor per sample."""
    factors = factors.reshape(factors.shape + (1,) * (f.ndim - factors.ndim))

    @uncompiled
    def scaled(gradient: Tensor) -> Tensor:
        return torch.where(factors == 0, 0.0, gradient * factors).to(gradient.dtype)

    same = f.view_as(f)
    if same.requires_grad:
        same.register_hook(scaled)  # type: ignore[no-untyped-call]
    return same


def stepped(loop: Loop, skipped: float | Tensor, by_scaler: bool) -> None:
    """The optimizer has ended the step: ``on_step`` of :class:`~.optimizer.OptimizerHooks`."""
    recoverer = loop.actions.recoverer
    if loop.hooks is not None:
        loop.hooks.unended.stepped(loop.rows.losses_in_step)
    if recoverer is not None and (recoverer.attempt or loop.actions.offer is None):
        loop.rows.note({"recovery/attempt": float(recoverer.attempt)})
    loop.rows.note_news("scaler/skipped" if by_scaler else "nonfinite/gradients", skipped)
    follow(loop, loop.rows.end_step)
    raise_pending(loop)
    if recoverer is not None and loop.actions.takes_back:
        loop.actions.attempt(keep_or_roll_back, loop, recoverer)


def _check_steps(loop: Loop) -> None:
    """Check, before a loss, that the attached optimizer is the one that steps."""
    if loop.hooks is None:
        return
    unended = loop.hooks.unended
    context = loop.rows.losses_in_step, loop.energy_parameters, loop.settings
    instead = unended.check(*context, lambda: loop.now.is_off)
    if unended.is_found and loop.actions.takes_back:
        loop.actions.end_rollbacks()  # no step would ever carry one out
    if instead is not None:
        attach_trainer(loop, loop.trainer.extended(optimizer=instead))


def attach_trainer(loop: Loop, trainer: Trainer) -> None:
    """Take these parts, and hang on their optimizer, which calls :func:`stepped`."""
    settings = loop.settings
    loop.actions.attach(trainer)
    if trainer.optimizer is not None:
        if loop.hooks is not None:
            loop.hooks.remove()
        # The optimizer may outlive the guard, and must not keep it.
        loop_ref = weakref.ref(loop)

        def on_step(*outcome: Any) -> None:
            if (it := loop_ref()) is not None:
                stepped(it, *outcome)

        recoverer = loop.actions.recoverer
        loop.hooks = OptimizerHooks(
            trainer.optimizer,
            trainer.scaler,
            on_step,
            # An update by the optimizer cannot be split by the members of an ensemble.
            lambda: not settings.models and (it := loop_ref()) is not None and it.rows.is_slow,
            on_update=loop.measure.update,
            process_group=settings.process_group,
            rate=None if recoverer is None else recoverer.rate,
        )
        loop.hook_refs[:] = [weakref.ref(loop.hooks)]
    loop.trainer = trainer
