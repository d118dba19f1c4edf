"""The contrastive part of a trainer's loss: ``weight * (difference of means)``.

Softplus, hinge, L2 or InfoNCE terms belong outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..errors import LossError
from ..objective import mean_difference

__all__ = ["CallerLoss", "Convention", "LossFn"]

Convention: TypeAlias = Literal["log_density", "energy"]
LossFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]

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
