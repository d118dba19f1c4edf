"""The loss calls of a training loop: the checks, the loss itself, and its measurements.

The guard replaces the contrastive part of a trainer's loss, ``weight * (difference of means)``.
Softplus, hinge, L2 or InfoNCE terms belong outside.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as uncompiled

from ..energies import per_sample, widened
from ..errors import LossError, SamplerError
from ..objective import mean_difference
from ..ranks import Batch, whole_batch
from ..sampling import is_capturing
from .ensemble import check_models
from .loop import Loop
from .sampling import CallLock
from .strength import StrengthAt
from .watches import ParameterHistory

__all__ = ["CallerLoss", "Convention", "LossFn", "Losses"]

Convention: TypeAlias = Literal["log_density", "energy"]
LossFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")

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


# Scales and shifts of the points where a loss is looked at. The far ones, where a wide clamp or a
# small square shows: energies get there in a blow-up.
_PLACES = (1.0, 0.0), (2.0, 3.0), (2.0, -3.0), (20.0, 0.0), (1.0, 1e4), (1.0, -1e4)
_FIX = "Keep the contrastive difference here and add the other terms outside."
_SAMPLER = "If it is the sampler, that comes second: guard(None, sampler, ...)."
_TURNED = {  # what a loss of the other sign does, the convention that it fits, and where f is
    "log_density": ("lower f on data, which is right if f is an energy", "energy", "high"),
    "energy": ("raise f on data, which is right if f is a log-density", "log_density", "low"),
}


class CallerLoss:
    """A checked ``loss_fn(f_pos, f_neg)``, or the plain difference of means where it is None."""

    def __init__(self, loss_fn: LossFn | None, convention: Convention) -> None:
        self._loss_fn = loss_fn
        self._sign = 1.0 if convention == "log_density" else -1.0
        self._convention = convention
        self._checked = loss_fn is None

    def plain(self, f_pos: Tensor, f_neg: Tensor) -> Tensor:
        """Return the unguarded loss (Eq. 3), the caller's, untouched."""
        if self._loss_fn is not None:
            return self._loss_fn(f_pos, f_neg)
        loss = mean_difference(f_pos, f_neg)
        return loss if self._sign > 0 else -loss

    def check(self, f_pos: Tensor, f_neg: Tensor) -> None:
        """Refuse a loss that is not a weighted difference of means with the declared sign, once.

        A weight of 0 shows nothing, so the next loss is checked again.
        """
        if self._checked:
            return
        # The guard must not move the trainer's random state.
        generator, slopes = torch.Generator("cpu").manual_seed(0), []

        def points(f: Tensor, scale: float, shift: float) -> Tensor:
            drawn = torch.randn(f.shape, generator=generator, device="cpu")
            return (drawn * scale + shift).to(f.device)

        drawn = [(points(f_pos, *place), points(f_neg, place[0], -place[1])) for place in _PLACES]
        for energies in (*drawn, drawn[0]):
            to_pos, to_neg = self._gradients(*energies)
            up, down = to_neg.cpu().double(), -to_pos.cpu().double()
            size = max(side.abs().max().item() for side in (up, down))
            if not all(torch.isfinite(side).all() for side in (up, down)):
                raise LossError("loss_fn has a gradient that is not finite on ordinary energies.")
            if max((side - side.mean()).abs().max().item() for side in (up, down)) > 1e-4 * size:
                raise LossError(
                    "loss_fn is not affine in the energies: samples of one side get different "
                    f"gradients (softplus, hinge, L2, InfoNCE or a clamp inside?). {_FIX}"
                )
            slopes.append((up.sum().item(), down.sum().item()))
        largest = max(abs(slope) for pair in slopes for slope in pair)
        if largest == 0:
            return  # a ramp that starts at 0: it shows no slope yet
        if abs(slopes[0][0] - slopes[-1][0]) > 1e-4 * largest:
            raise LossError(
                "loss_fn gave two different gradients for the same energies: its weight counts its "
                "own calls. Let it depend on your step counter instead."
            )
        if any(abs(up - slopes[0][0]) > 1e-4 * largest for up, _ in slopes):
            raise LossError(
                "loss_fn is not affine in the energies: its slope changes from point to point "
                f"(softplus, tanh, hinge or clamp of the difference?). {_FIX}"
            )
        rise, fall = slopes[0]
        if abs(rise - fall) > 1e-4 * largest:
            raise LossError(
                f"loss_fn weighs the two sides differently: total slope {fall:g} on f_pos against "
                f"{rise:g} on f_neg. Use means, or sums over equally many positives and negatives."
            )
        if self._sign * rise < 0:
            effect, other, height = _TURNED[self._convention]
            raise LossError(
                f"loss_fn's sign contradicts convention={self._convention!r}. Minimising it would "
                f"{effect}: then pass convention={other!r}. If f is {height} on data, the "
                "difference is the wrong way round (you maximise it, perhaps: return its negative)."
            )
        self._checked = True

    def weight(self, f_pos: Tensor, f_neg: Tensor, models: Sequence[int] = ()) -> Tensor | None:
        """The 0-dim c of ``c * (mean f⁻ - mean f⁺)``, by autograd; None without a ``loss_fn``.

        For an ensemble, the difference is summed over its model dimensions.
        """
        if self._loss_fn is None:
            return None
        _, to_neg = self._gradients(f_pos, f_neg)
        return self._sign * to_neg.sum() / (math.prod(models) if models else to_neg[0].numel())

    def _gradients(self, f_pos: Tensor, f_neg: Tensor) -> tuple[Tensor, Tensor]:
        loss_fn: Any = self._loss_fn
        # Copies of tensors of torch.inference_mode, which take part in no graph.
        with torch.inference_mode(False), torch.enable_grad():
            dtype = torch.promote_types(f_pos.dtype, torch.float32)
            pos = f_pos.detach().to(dtype, copy=f_pos.is_inference()).requires_grad_()
            neg = f_neg.detach().to(dtype, copy=f_neg.is_inference()).requires_grad_()
            try:
                value = loss_fn(pos, neg)
            except TypeError as error:
                raise LossError(f"loss_fn(f_pos, f_neg) failed: {error}. {_SAMPLER}") from error
            if not isinstance(value, Tensor) or value.ndim:
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise LossError(
                    f"loss_fn must return one number as a 0-dim tensor; got {what}. {_SAMPLER}"
                )
            if not value.requires_grad:
                raise LossError(
                    "loss_fn's result does not depend on f_pos and f_neg through autograd (a "
                    f"`.item()`, `.detach()` or `no_grad` inside?). {_FIX}"
                )
            gradients: Any = torch.autograd.grad(value, (pos, neg), allow_unused=True)
        to_pos, to_neg = gradients
        if to_pos is None or to_neg is None:
            missing = "f_pos" if to_pos is None else "f_neg"
            raise LossError(f"loss_fn does not use {missing}; it must hold the difference of both.")
        return to_pos, to_neg


def _without_gradient(loss: Tensor, *sides: Tensor) -> Tensor:
    """Return the loss with a zero gradient, also for NaN energies; NaN where all of a side are."""
    value = loss.detach()
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


class Losses:
    """Computes the guarded loss from energies, and passes its measurements to the loop."""

    def __init__(self, loop: Loop, caller_loss: CallerLoss) -> None:
        self._loop = loop
        self._caller_loss = caller_loss
        self._has_trained = False  # whether a loss had a gradient
        self._is_quiet = False  # whether the loss under way leaves no trace
        self._without = 0  # losses without a gradient, before the first with one
        self._moves = ParameterHistory()
        self._turn = CallLock()

    def loss(self, batch: Batch) -> Tensor:
        """See :meth:`ebmguard.Guard.loss`."""
        return self._turn.run(partial(self._one_loss, self._loss, batch))

    def reweight(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See :meth:`ebmguard.Guard.reweight`."""
        return self._turn.run(partial(self._one_loss, self._reweight, batch))

    def _one_loss(self, call: Callable[[Batch, StrengthAt], T], batch: Batch, is_free: bool) -> T:
        """Let one thread in and call; record nothing of a loss that cannot train, a validation's.

        Energies that never had a gradient are recorded where gradients are enabled.
        """
        if not is_free:
            raise LossError(_UNDER_WAY)
        is_paused = self._loop.paused_by is not None
        f_pos, f_neg = batch[:2]
        trains = getattr(f_pos, "requires_grad", False) or getattr(f_neg, "requires_grad", False)
        rests = not torch.is_grad_enabled() or (self._has_trained and not trains)
        self._is_quiet = is_paused or rests
        result = call(batch, self._begin(batch))
        if rests and not (is_paused or self._loop.rows.losses) and self._without < _LOOKS:
            self._without += 1
            energy = self._loop.sampling.parameters(self._loop.trainer)
            if self._moves.see(energy) >= _MOVES:
                self._without = _LOOKS
                _log.warning(_NO_GRADIENT)
        self._has_trained |= trains and not self._is_quiet
        return result

    def _loss(self, batch: Batch, strength: StrengthAt) -> Tensor:
        loop, sides = self._loop, batch[:2]
        if not self._is_quiet:
            step = loop.rows.step
            loop.first_losses.check_gradients(*sides, step, only_warns=strength.is_off)
        if strength.is_off:
            loss = self._caller_loss.plain(*sides)
            loss = self._take(batch, strength, loss, shown={"loss": loss})
        else:
            weight = self._caller_loss.weight(*sides, loop.settings.models)
            loss = self._take(batch, strength, weight=weight)
        loss = loss.sum() if loss.ndim else loss
        if loop.actions.pending and (loss.requires_grad or not self._is_quiet):
            return _without_gradient(loss, *sides)
        loop.first_calls.watch(loss, loop.trainer.optimizer)
        return loss

    def _reweight(self, batch: Batch, strength: StrengthAt) -> tuple[Tensor, Tensor]:
        loop, (f_pos, f_neg) = self._loop, batch[:2]
        if not torch.is_grad_enabled():
            return f_pos, f_neg
        # In float32 at least: the factors have digits that half precision would lose.
        pos, neg = (widened(f.detach()).requires_grad_() for f in (f_pos, f_neg))
        with torch.enable_grad():
            off = f_pos.new_zeros(()) if strength.is_off else None
            loss = self._take(batch._replace(f_pos=pos, f_neg=neg), strength, off)
        if loop.actions.pending:
            zero = f_pos.new_zeros(())
            return _scaled_gradient(f_pos, zero), _scaled_gradient(f_neg, zero)
        if strength.is_off:
            return f_pos, f_neg
        to_pos, to_neg = torch.autograd.grad(loss.sum(), (pos, neg))
        sign, n = loop.settings.sign, len(loop.settings.models)
        return (
            _scaled_gradient(f_pos, to_pos * (-sign * f_pos.shape[n])),
            _scaled_gradient(f_neg, to_neg * (sign * f_neg.shape[n])),
        )

    def _begin(self, batch: Batch) -> StrengthAt:
        """Refuse what cannot be meant before anything changes; then end the step before."""
        loop = self._loop
        loop.check_open()
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
            alone = not loop.settings.has_sampler and not loop.is_inline and not loop.is_told_steps
            if alone:
                loop.raise_pending()  # this loop has no other safe point
            loop.actions.check_ready(loop.trainer, is_shared=loop.claims.is_shared)
            begins = alone and loop.rows.losses_in_step > 0
        strength = loop.strength_at(loop.rows.step + begins)
        if not strength.is_off:
            loop.strength.check_known(loop.first_calls.result)
        check_models(loop.settings.models, loop.settings.variant, batch, strength.beta_star)
        if loop.settings.has_sampler and not loop.sampling.calls and not self._is_quiet:
            raise SamplerError(
                "The loss was called, but the guarded sampler never was: the negatives come from "
                "elsewhere. Draw them with the sampler that guard() returned (is the name still "
                "bound to the original one?), or pass sampler=None."
            )
        self._caller_loss.check(*batch[:2])
        if not self._is_quiet:
            measured = loop.first_calls.result
            scale = loop.strength.output_scale if loop.strength.is_measured else None
            is_off = strength.is_off
            loop.first_losses.check(*batch[:2], measured, only_warns=is_off, scale=scale)
            if not loop.claims.began:
                loop.claims.begin([*loop.sampling.temperings])
            loop.actions.begin(loop.rows.step, loop.trainer, loop.own_state)
        if begins:
            loop.follow(loop.rows.end_step)
            return loop.strength_at(loop.rows.step)  # which that row may have steered
        return strength

    def _take(
        self,
        batch: Batch,
        strength: StrengthAt,
        loss: Tensor | None = None,
        weight: Tensor | None = None,
        shown: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Measure and return the loss of a call, times its weight; at β* = 0, the loss passed in.

        The row holds the weighted loss and its weight, or what is ``shown``.
        """
        loop, settings = self._loop, self._loop.settings
        if not self._is_quiet:
            loop.unused.loss()
            if loop.actions.asks_steps:
                loop.rows.note({"sampler/steps": float(loop.actions.steps)})
        slow = not self._is_quiet and loop.rows.begin_loss(is_on_host=not batch.f_pos.is_cuda)
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
        unweighted_loss, numbers = loop.measure.computed(batch, strength)
        shown = {} if loss is None else shown or {}
        if loss is None:
            assert unweighted_loss is not None
            loss = unweighted_loss if weight is None else weight * unweighted_loss
            shown = {"loss": loss} if weight is None else {"loss": loss, "loss_weight": weight}
        if not self._is_quiet:
            loop.rows.waits = loop.can_wait(batch)
            measured = loop.trainer, batch, strength, numbers, shown
            is_pooled = loop.rows.is_pooled
            call, samples = loop.measure.loss(*measured, slow=slow, is_pooled=is_pooled)
            loop.turns.run(partial(loop.rows.add, call, samples))
            if not loop.rows.waits:
                loop.read_all()
        return loss
