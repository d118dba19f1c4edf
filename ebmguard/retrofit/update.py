"""What one step of an optimizer changes, from a copy of the parameters taken before it.

Where parameters are sharded over ranks, each measures its part, and one message of a number for the
gradient and one for each parameter group joins them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..diagnostics import total_norm
from ..ranks import gathered
from ..shards import copies, is_sharded, local

__all__ = ["PendingUpdate", "Update", "dense"]


class Update(NamedTuple):
    """Sizes of one optimizer step, as 0-dim tensors, NaN where they are unknown.

    Attributes:
        gradient_norm: ‖gradient‖ of all parameters, without an AMP scale.
        norm: ‖update‖.
        relative_norm: ‖update / lr‖, each parameter's by the learning rate of its group; NaN where
            the step was left out.
    """

    gradient_norm: Tensor
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
        process_group: the ranks over which parameters may be sharded.
        has_gradients: whether the gradients are those that the step will use; not with a closure.
    """

    @torch.no_grad()
    def __init__(
        self,
        optimizer: Optimizer,
        process_group: dist.ProcessGroup | None,
        *,
        has_gradients: bool,
    ) -> None:
        self._groups: list[_Group] = []
        with_gradient: list[Tensor] = []
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.requires_grad and p.numel()]
            with_gradient += [p for p in parameters if p.grad is not None]
            gradients += [dense(p.grad) for p in parameters if p.grad is not None]
            lr = group.get("lr", math.nan)
            lr = lr.detach().clone() if isinstance(lr, Tensor) else float(lr)
            if parameters:
                before = [local(p.detach()).clone() for p in parameters]
                self._groups.append(_Group(parameters, before, lr))
        every = [p for group in self._groups for p in group.parameters]
        self._process_group = process_group if any(map(is_sharded, every)) else None
        self._gradient_norm: Tensor | None = None
        if has_gradients and with_gradient:
            norm = self._norm(gradients, with_gradient)
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
        norms = [
            self._norm(torch._foreach_sub([local(p) for p in g.parameters], g.before), g.parameters)
            for g in self._groups
        ]
        device = norms[0].device
        of_gradient = torch.full_like(norms[0], torch.nan)
        if self._gradient_norm is not None:
            of_gradient = self._gradient_norm.to(device)
        table = torch.stack([of_gradient, *(x.to(device) for x in norms)])
        if self._process_group is not None:
            table = torch.linalg.vector_norm(*gathered(self._process_group, table), dim=0)
        gradient_norm, *norms = table.unbind()
        relative = torch.stack(
            [
                x / (g.lr.to(device) if isinstance(g.lr, Tensor) else g.lr)
                for x, g in zip(norms, self._groups, strict=True)
            ]
        )
        if isinstance(skipped, Tensor):
            relative = torch.where(skipped.to(device) > 0, torch.nan, relative)
        elif skipped:
            relative = relative * torch.nan
        return Update(
            gradient_norm,
            torch.linalg.vector_norm(table[1:]),
            torch.linalg.vector_norm(relative),
        )

    def _norm(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """‖all tensors‖; where some are sharded, this rank's share, whose squares add up to it.

        Args:
            tensors: what this rank holds of them.
            parameters: to which they belong.
        """
        if self._process_group is None:
            return total_norm(tensors)
        world = dist.get_world_size(self._process_group)
        on_ranks = [copies(p, world) for p in parameters]
        found = [
            total_norm([x for x, c in zip(tensors, on_ranks, strict=True) if c == count])
            / math.sqrt(count)
            for count in sorted(set(on_ranks))
        ]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([x.to(found[0].device) for x in found]))
        return norm


def dense(gradient: Tensor) -> Tensor:
    """The entries of a gradient that this rank stores, detached."""
    gradient = local(gradient.detach())
    return gradient.coalesce().values() if gradient.is_sparse else gradient
