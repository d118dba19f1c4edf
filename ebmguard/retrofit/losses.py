"""The loss calls of a training loop: what they refuse, the loss, and what is measured of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..energies import per_sample, widened
from ..errors import LossError, SamplerError
from ..ranks import Batch, whole_batch
from ..sampling import is_capturing
from .ensemble import check_models
from .loop import Loop
from .loss_fn import CallerLoss, no_gradient, scaled_gradient
from .rows import Part
from .sampling import Turn
from .strength import StrengthAt
from .watches import Moves

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
    def _one_loss(self, own: Batch) -> Iterator[StrengthAt]:
        """Let one thread in, begin; of a loss that cannot train, a validation's, record nothing.

        Energies that never had a gradient are recorded where gradients are enabled.
        """
        with self._turn.take() as is_free:
            if not is_free:
                raise LossError(_UNDER_WAY)
            is_paused = self._loop.is_paused
            trains = any(getattr(f, "requires_grad", False) for f in own[:2])
            rests = not torch.is_grad_enabled() or (self._has_trained and not trains)
            self._is_quiet = is_paused or rests
            yield self._begin(own)
        if rests and not is_paused and not self._loop.rows.losses:
            self._look_for_training()
        self._has_trained |= trains and not self._is_quiet

    def _look_for_training(self) -> None:
        """Warn once where parameters move on, and no loss ever had a gradient."""
        self._without += 1
        if self._without <= _LOOKS and self._moves.see(self._loop.energy_parameters()) >= _MOVES:
            self._without = _LOOKS
            _log.warning(_NO_GRADIENT)

    def loss(self, own: Batch) -> Tensor:
        """See :meth:`ebmguard.Guard.loss`."""
        loop, sides = self._loop, own[:2]
        with self._one_loss(own) as strength:
            if not self._is_quiet:
                step = loop.rows.step
                loop.first_losses.check_gradients(*sides, step, only_warns=strength.is_off)
            loss = weight = None
            if strength.is_off:
                loss = self._caller_loss.plain(*sides)
            else:
                weight = self._caller_loss.weight(*sides, loop.settings.models)
            shown = None if loss is None else {"loss": loss}
            loss = self._take(own, strength, loss, weight, shown)
            if loop.actions.is_pending and (loss.requires_grad or not self._is_quiet):
                return no_gradient(own.f_pos) + no_gradient(own.f_neg)
            loss = loss.sum() if loss.ndim else loss
            loop.first_calls.watch(loss, loop.trainer.optimizer)
            return loss

    def reweight(self, own: Batch) -> tuple[Tensor, Tensor]:
        """See :meth:`ebmguard.Guard.reweight`."""
        loop, (f_pos, f_neg) = self._loop, own[:2]
        with self._one_loss(own) as strength:
            if not torch.is_grad_enabled():
                return f_pos, f_neg
            # In float32 at least: the factors have digits that half precision would lose.
            pos, neg = (widened(f.detach()).requires_grad_() for f in (f_pos, f_neg))
            with torch.enable_grad():
                off = torch.zeros(()) if strength.is_off else None
                loss = self._take(own._replace(f_pos=pos, f_neg=neg), strength, off)
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

    def _begin(self, own: Batch) -> StrengthAt:
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
        check_models(loop.settings.models, loop.settings.variant, own, strength.beta_star)
        if loop.has_sampler and not loop.sampling.calls and not self._is_quiet:
            raise SamplerError(
                "The loss was called, but the guarded sampler never was: the negatives come from "
                "elsewhere. Draw them with the sampler that guard() returned (is the name still "
                "bound to the original one?), or pass sampler=None."
            )
        self._caller_loss.check(*own[:2])
        if not self._is_quiet:
            found = loop.first_calls.result
            loop.first_losses.check(*own[:2], found, only_warns=strength.is_off)
            if loop.actions.recoverer is not None:
                loop.actions.recoverer.keep_first(loop.rows.step, loop.trainer, loop.own_state)
        if begins:
            loop.follow(loop.rows.end_step())
            return loop.strength_at(loop.rows.step)  # which that row may have steered
        return strength

    def _take(
        self,
        own: Batch,
        strength: StrengthAt,
        loss: Tensor | None,
        weight: Tensor | None = None,
        shown: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The loss of a call, measured; where one is given, β* = 0, that one.

        Args:
            weight: factor on it, shown in the row with the result.
            shown: what else the row has of it.
        """
        loop, settings = self._loop, self._loop.settings
        if not self._is_quiet:
            loop.unused.loss()
            loop.rows.note(loop.actions.notes())
        slow = not self._is_quiet and loop.rows.begin_loss(is_on_host=not own.f_pos.is_cuda)
        sides: Iterable[Tensor] = own[:2]
        if strength.is_off:  # nothing of what follows may touch the graph of the caller's loss
            sides = (f.detach() for f in sides)
        pos, neg = map(widened if settings.models else per_sample, sides)
        if settings.sign < 0:
            pos, neg = -pos, -neg
        own = own._replace(f_pos=pos, f_neg=neg, of_neg=loop.measure.parts_of(neg))
        if settings.process_group is not None:
            star = "off" if strength.is_off else strength.beta_star
            own = whole_batch(settings.process_group, own, same=(star, settings.variant))
        found, sums = loop.measure.computed(own, strength)
        if loss is None:
            assert found is not None
            loss = found if weight is None else weight * found
        if not self._is_quiet:
            parts, known, samples = loop.measure.loss(
                loop.trainer, own, strength, sums, slow=slow, is_pooled=loop.rows.is_pooled
            )
            shown = shown if weight is None else {"loss": loss, "loss_weight": weight}
            if shown:
                detached = {name: x.detach() for name, x in shown.items()}
                parts.append(Part.of(detached, settings.models))
            loop.follow(loop.rows.add(parts, known, samples))
        return loss
