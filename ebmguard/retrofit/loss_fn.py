"""The contrastive part of a trainer's own loss: ``weight * (difference of means)``, nothing else.

Softplus, hinge, L2 or InfoNCE terms belong outside: the guard replaces the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..errors import LossError
from ..objective import mean_difference

__all__ = ["CallerLoss", "Convention", "LossFn", "no_gradient", "scaled_gradient"]

Convention: TypeAlias = Literal["log_density", "energy"]
LossFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]

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
        """The unguarded loss (Eq. 3): the caller's own, untouched."""
        if self._loss_fn is not None:
            return self._loss_fn(f_pos, f_neg)
        loss = mean_difference(f_pos, f_neg)
        return loss if self._sign > 0 else -loss

    def check(self, f_pos: Tensor, f_neg: Tensor) -> None:
        """Refuse a loss that is no weighted difference of means of the declared sign, once.

        A weight of 0 shows nothing and is looked at again.
        """
        self._checked = self._checked or self._examine(f_pos, f_neg)

    def weight(self, f_pos: Tensor, f_neg: Tensor, models: Sequence[int] = ()) -> Tensor | None:
        """The 0-dim c of ``c * (mean f⁻ - mean f⁺)``, by autograd; None without a ``loss_fn``.

        Of an ensemble the difference is summed over its model dimensions. LossError where the
        result is not one number that depends on both arguments.
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

    def _examine(self, f_pos: Tensor, f_neg: Tensor) -> bool:
        slopes = []
        for pos, neg in _points(f_pos, f_neg):
            to_pos, to_neg = self._gradients(pos, neg)
            up, down = to_neg.double(), -to_pos.double()
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
            return False  # a ramp that starts at 0: nothing can be seen yet
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
        return True


def _points(f_pos: Tensor, f_neg: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A few spread-out points, the first one repeated at the end."""
    # The guard must not move the trainer's random state.
    generator = torch.Generator().manual_seed(0)

    def point(shift: float, scale: float) -> tuple[Tensor, Tensor]:
        pos = torch.randn(f_pos.shape, generator=generator) * scale + shift
        neg = torch.randn(f_neg.shape, generator=generator) * scale - shift
        return pos.to(f_pos.device), neg.to(f_neg.device)

    # The far ones, where a wide clamp or a small square shows: energies get there in a blow-up.
    places = (0.0, 1.0), (3.0, 2.0), (-3.0, 2.0), (0.0, 20.0), (1e4, 1.0), (-1e4, 1.0)
    points = [point(*place) for place in places]
    return [*points, points[0]]


def no_gradient(f: Tensor) -> Tensor:
    """0 with a zero gradient, also where f is NaN."""
    return torch.where(torch.zeros_like(f, dtype=torch.bool), f, 0.0).sum()


def scaled_gradient(f: Tensor, by: Tensor) -> Tensor:
    """f itself; gradients that pass backward are multiplied by ``by``, one factor per sample."""
    by = by.reshape(by.shape + (1,) * (f.ndim - by.ndim))

    def scaled(gradient: Tensor) -> Tensor:
        return torch.where(by == 0, 0.0, gradient * by).to(gradient.dtype)

    same = f.view_as(f)
    if same.requires_grad:
        same.register_hook(scaled)  # type: ignore[no-untyped-call]
    return same
