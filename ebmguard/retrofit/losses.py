"""The loss calls of a training loop: what they refuse, the loss, and what is measured of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..energies import Groups, LogQ, per_sample, widened
from ..errors import LossError, SamplerError
from ..ranks import Batch, whole_batch
from ..sampling import is_capturing
from .ensemble import check_models
from .loop import Loop
from .loss_fn import CallerLoss, no_gradient, scaled_gradient
from .parts import Part
from .sampling import Turn
from .strength import StrengthAt
from .unended import Moves

__all__ = ["Losses"]

_log = logging.getLogger("ebmguard")

# Losses that are looked at, and moves of the parameters among them that no validation makes.
_LOOKS, _MOVES = 20, 10
_UNDER_WAY = (
    "The guarded loss was called while another call of it was under way: from a second "
    "thread, or inside loss_fn or on_alert. Losses belong to the steps of one training "
    "loop; give every thread a guard of its own."
)
_NO_GRADIENT = (
    "The guarded loss was called only where gradients are disabled, while parameters move: such "
    "losses are taken for a validation's, and nothing is recorded. Call it where gradients are "
    "enabled; to log energies that need none, inside `with torch.enable_grad():`."
)


class Losses:
    """Makes the guarded loss of energies, and hands what it shows to the loop."""

    def __init__(self, loop: Loop, caller_loss: CallerLoss) -> None:
        self._loop = loop
        self._caller_loss = caller_loss
        self._has_trained = False  # whether a loss had a gradient
        self._is_quiet = False  # whether the loss under way leaves no trace
        self._without = 0  # losses without a gradient, before the first with one
        self._moves = Moves()
        self._turn = Turn()

    @contextmanager
    def _one_loss(self, f_pos: Tensor, f_neg: Tensor) -> Iterator[None]:
        """Let one thread in; of a loss that cannot train, a validation's, record nothing.

        Energies that never had a gradient are recorded where gradients are enabled.
        """
        with self._turn.take() as is_free:
            if not is_free:
                raise LossError(_UNDER_WAY)
            is_paused = self._loop.is_paused
            trains = any(getattr(f, "requires_grad", False) for f in (f_pos, f_neg))
            rests = not torch.is_grad_enabled() or (self._has_trained and not trains)
            self._is_quiet = is_paused or rests
            yield
        if rests and not is_paused and not self._loop.rows.losses:
            self._look_for_training()
        self._has_trained |= trains and not self._is_quiet

    def _look_for_training(self) -> None:
        """Warn once where parameters move on, and no loss ever had a gradient."""
        self._without += 1
        if self._without <= _LOOKS and self._moves.see(self._loop.energy_parameters()) >= _MOVES:
            self._without = _LOOKS
            _log.warning(_NO_GRADIENT)

    def loss(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None, log_q: LogQ | None
    ) -> Tensor:
        """See :meth:`ebmguard.Guard.loss`."""
        loop = self._loop
        with self._one_loss(f_pos, f_neg):
            strength = self._begin_loss(f_pos, f_neg, groups, log_q)
            if not self._is_quiet:
                is_off, step = strength.is_off, loop.rows.step
                loop.first_losses.check_gradients(f_pos, f_neg, step, only_warns=is_off)
            loss = weight = None
            if strength.is_off:
                loss = self._caller_loss.plain(f_pos, f_neg)
            else:
                weight = self._caller_loss.weight(f_pos, f_neg, loop.settings.models)
            loss = self._take_loss(f_pos, f_neg, groups, log_q, strength, loss, weight)
            if loop.actions.is_pending and (loss.requires_grad or not self._is_quiet):
                return no_gradient(f_pos) + no_gradient(f_neg)
            loss = loss.sum() if loss.ndim else loss
            loop.first_calls.watch(loss, loop.trainer.optimizer)
            return loss

    def reweight(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None, log_q: LogQ | None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`ebmguard.Guard.reweight`."""
        loop = self._loop
        with self._one_loss(f_pos, f_neg):
            strength = self._begin_loss(f_pos, f_neg, groups, log_q)
            if not torch.is_grad_enabled():
                return f_pos, f_neg
            # In float32 at least: the factors have digits that half precision would lose.
            pos, neg = (widened(f.detach()).requires_grad_() for f in (f_pos, f_neg))
            with torch.enable_grad():
                off = torch.zeros(()) if strength.is_off else None
                beside = groups, log_q, strength
                loss = self._take_loss(pos, neg, *beside, off, None, is_shown=False)
            if loop.actions.is_pending:
                zero = f_pos.new_zeros(())
                return scaled_gradient(f_pos, zero), scaled_gradient(f_neg, zero)
            if strength.is_off:
                return f_pos, f_neg
            to_pos, to_neg = torch.autograd.grad(loss.sum(), (pos, neg))
            sign, n = loop.settings.sign, loop.settings.sample_dim
            return (
                scaled_gradient(f_pos, to_pos * (-sign * f_pos.shape[n])),
                scaled_gradient(f_neg, to_neg * (sign * f_neg.shape[n])),
            )

    def _begin_loss(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None, log_q: LogQ | None
    ) -> StrengthAt:
        """Refuse what cannot be meant before anything changes; then end the step before."""
        loop = self._loop
        if is_capturing():
            raise LossError(
                "The guarded loss was called while a CUDA graph is captured; the guard would miss "
                "every replay, and β would stay that of now. Capture the sampler and the network, "
                "and call the guarded loss outside of them at every step."
            )
        begins = False
        if not self._is_quiet:
            loop.check_steps()
            # Where nothing else tells that a step is over, the next loss does.
            alone = not loop.has_sampler and not loop.is_inline and not loop.is_told_steps
            if alone:
                loop.raise_pending()  # this loop has no other safe point
            loop.actions.check_ready(loop.trainer)
            begins = alone and loop.rows.losses_in_step > 0
        strength = loop.strength_at(loop.rows.step + begins)
        if not strength.is_off:
            loop.strength.check_known(loop.first_calls.result)
        told = loop.settings.models, loop.settings.variant
        check_models(*told, f_pos, f_neg, strength.beta_star, groups, log_q)
        if loop.has_sampler and not loop.sampling.calls and not self._is_quiet:
            raise SamplerError(
                "The loss was called, but the guarded sampler never was: the negatives come from "
                "elsewhere. Draw them with the sampler that guard() returned (is the name still "
                "bound to the original one?), or pass sampler=None."
            )
        self._caller_loss.check(f_pos, f_neg)
        if not self._is_quiet:
            is_off = strength.is_off
            loop.first_losses.check(f_pos, f_neg, loop.first_calls.result, only_warns=is_off)
            if loop.actions.recoverer is not None:
                loop.actions.recoverer.keep_first(loop.rows.step, loop.trainer, loop.own_state)
        if begins:
            loop.follow(loop.rows.end_step())
            return loop.strength_at(loop.rows.step)  # which that row may have steered
        return strength

    def _take_loss(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        groups: Groups | None,
        log_q: LogQ | None,
        strength: StrengthAt,
        loss: Tensor | None,
        weight: Tensor | None,
        *,
        is_shown: bool = True,
    ) -> Tensor:
        """The loss of a call, measured; where one is given, β* = 0, that one.

        Args:
            weight: factor on it.
            is_shown: whether the row has the loss.
        """
        loop = self._loop
        if not self._is_quiet:
            loop.unused.loss()
            loop.rows.note(loop.actions.notes())
        slow = not self._is_quiet and loop.rows.begin_loss(is_on_host=not f_pos.is_cuda)
        settings, sides = loop.settings, (f_pos, f_neg)
        if strength.is_off:  # nothing of what follows may touch the graph of the caller's loss
            sides = f_pos.detach(), f_neg.detach()
        pos, neg = map(widened if settings.models else per_sample, sides)
        if settings.sign < 0:
            pos, neg = -pos, -neg
        own = Batch(pos, neg, groups, log_q, loop.measure.parts_of(neg))
        if settings.process_group is not None:
            star = "off" if strength.is_off else strength.beta_star
            own = whole_batch(settings.process_group, own, same=(star, settings.variant))
        found, sums = loop.measure.computed(own, strength, loop.compute)
        if loss is None:
            assert found is not None
            loss = found if weight is None else weight * found
        if not self._is_quiet:
            tier = {"slow": slow, "is_pooled": loop.rows.is_pooled}
            numbers = loop.measure.loss(loop.trainer, own, strength, sums, **tier)
            parts, known, samples = numbers
            shown = {} if weight is None else {"loss": loss, "loss_weight": weight}
            if strength.is_off and is_shown:
                shown["loss"] = loss
            if shown:
                shown = {name: x.detach() for name, x in shown.items()}
                parts.append(Part.of(shown, settings.models))
            loop.follow(loop.rows.add(parts, known, samples))
        return loss
