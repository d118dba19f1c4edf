"""The contrastive part of a trainer's own loss, read as ``weight * (difference of means)``.

The guard replaces that difference. It can do so only where the loss is affine in the energies, with
equal coefficients on each side that cancel; softplus, hinge, L2 or InfoNCE terms belong outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..errors import LossError
from ..objective import mean_difference
from .strength import NO_MODELS

__all__ = ["CallerLoss", "Convention", "LossFn", "no_gradient", "scaled_gradient"]

Convention: TypeAlias = Literal["log_density", "energy"]
LossFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_FIX = "Keep the contrastive difference here and add the other terms outside."


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
        """Refuse a loss that is not a weighted difference of means of the declared sign.

        Done once, on energies of these shapes; a weight of 0 shows nothing and is looked at again.
        """
        self._checked = self._checked or self._examine(f_pos, f_neg)

    def weight(self, f_pos: Tensor, f_neg: Tensor, models: torch.Size = NO_MODELS) -> Tensor | None:
        """The factor c for which the loss is ``c * (mean f⁻ - mean f⁺)``, read by autograd.

        Of an ensemble the difference is summed over its model dimensions.

        Returns:
            0-dim tensor, or None where no ``loss_fn`` was given (c = 1).

        Raises:
            LossError: the result is not one number that depends on both arguments.
        """
        if self._loss_fn is None:
            return None
        _, to_neg = self._gradients(f_pos, f_neg)
        return self._sign * to_neg.sum() / (models.numel() if models else to_neg[0].numel())

    def _gradients(self, f_pos: Tensor, f_neg: Tensor) -> tuple[Tensor, Tensor]:
        loss_fn: Callable[..., object] | None = self._loss_fn
        assert loss_fn is not None
        with torch.enable_grad():
            dtype = torch.promote_types(f_pos.dtype, torch.float32)
            pos = f_pos.detach().to(dtype).requires_grad_()
            neg = f_neg.detach().to(dtype).requires_grad_()
            value = loss_fn(pos, neg)
            if not isinstance(value, Tensor) or value.ndim:
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise LossError(f"loss_fn must return one number as a 0-dim tensor; got {what}.")
            if not value.requires_grad:
                raise LossError(
                    "loss_fn's result does not depend on f_pos and f_neg through autograd (a "
                    f"`.item()`, `.detach()` or `no_grad` inside?). {_FIX}"
                )
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                value, (pos, neg), allow_unused=True
            )
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
            size = max(up.abs().max().item(), down.abs().max().item())
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
            if self._convention == "log_density":
                effect = "lower f on data, which is right if f is an energy"
                other, height = "energy", "high"
            else:
                effect = "raise f on data, which is right if f is a log-density"
                other, height = "log_density", "low"
            raise LossError(
                f"loss_fn's sign contradicts convention={self._convention!r}. Minimising it would "
                f"{effect}: then pass convention={other!r}. If f is {height} on data, the "
                "difference is the wrong way round (you maximise it, perhaps: return its negative)."
            )
        return True


def _points(f_pos: Tensor, f_neg: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A few spread-out points, the first one repeated at the end.

    They come from a generator of their own: the guard must not move the trainer's random state.
    """
    generator = torch.Generator().manual_seed(0)

    def point(shift: float, scale: float) -> tuple[Tensor, Tensor]:
        pos = torch.randn(f_pos.shape, generator=generator) * scale + shift
        neg = torch.randn(f_neg.shape, generator=generator) * scale - shift
        return pos.to(f_pos.device), neg.to(f_neg.device)

    points = [point(0.0, 1.0), point(3.0, 2.0), point(-3.0, 2.0), point(0.0, 20.0)]
    # Far ones, where a wide clamp or a small square shows; energies get there in a blow-up.
    points += [point(1e4, 1.0), point(-1e4, 1.0)]
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
