"""What one step of an optimizer changes, from a copy of the parameters taken before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .diagnostics import total_norm

__all__ = ["PendingUpdate", "Update", "dense"]


class Update(NamedTuple):
    """Sizes of one optimizer step, as 0-dim tensors, or NaN where they are unknown.

    Attributes:
        gradient_norm: ‖gradient‖ of all parameters, without an AMP scale.
        norm: ‖update‖.
        relative_norm: ‖update / lr‖, each parameter's by the learning rate of its group; NaN where
            the step was left out.
    """

    gradient_norm: float | Tensor
    norm: Tensor
    relative_norm: Tensor


@dataclass(frozen=True)
class _Group:
    parameters: list[Tensor]
    before: list[Tensor]
    lr: float | Tensor


class PendingUpdate:
    """An optimizer step that is about to be taken.

    Holds a copy of the parameters until it is over.

    Args:
        optimizer: before its step.
        has_gradients: whether the gradients are those that the step will use; not with a closure.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer, *, has_gradients: bool) -> None:
        self._groups = []
        gradients = []
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.requires_grad and p.numel()]
            gradients += [dense(p.grad) for p in parameters if p.grad is not None]
            lr = group.get("lr", math.nan)
            lr = lr.detach().clone() if isinstance(lr, Tensor) else float(lr)
            if parameters:
                before = [p.detach().clone() for p in parameters]
                self._groups.append(_Group(parameters, before, lr))
        self._gradient_norm: float | Tensor = math.nan
        gradients = [x for x in gradients if x.numel()]
        if has_gradients and gradients:
            norm = total_norm(gradients)
            # Fused optimizers divide by the scale themselves.
            scale = getattr(optimizer, "grad_scale", None)
            self._gradient_norm = norm if scale is None else norm / scale.to(norm.device)

    @torch.no_grad()
    def finish(self, skipped: float | Tensor) -> Update | None:
        """Measure it, once the step is over.

        Args:
            skipped: whether it was left out, as a number or, where the device decides, a tensor.

        Returns:
            the sizes, or None where there are no parameters.
        """
        if not self._groups:
            return None
        norms = [total_norm(torch._foreach_sub(g.parameters, g.before)) for g in self._groups]
        device = norms[0].device
        table = torch.stack([x.to(device) for x in norms])
        relative = torch.stack(
            [
                (x / (g.lr.to(x.device) if isinstance(g.lr, Tensor) else g.lr)).to(device)
                for x, g in zip(norms, self._groups, strict=True)
            ]
        )
        if isinstance(skipped, Tensor):
            relative = torch.where(skipped.to(device) > 0, torch.nan, relative)
        elif skipped:
            relative = relative * torch.nan
        return Update(
            self._gradient_norm,
            torch.linalg.vector_norm(table),
            torch.linalg.vector_norm(relative),
        )


def dense(gradient: Tensor) -> Tensor:
    """A gradient's stored entries, detached."""
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
