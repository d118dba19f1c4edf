"""How large the optimizer's update is where GradScale has made the gradient small.

If no negative is competitive, GradScale → 0 and the contrastive gradient fades. Adaptive optimizers
divide by the gradient's recent size and undo that (Appendix H of the paper), so that the network
keeps moving on next to no evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["amplification", "total_norm"]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all entries of dense tensors, 0-dim, on the device of the first."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        x = torch.view_as_real(x) if x.is_complex() else x
        # In float32 at least: the squares of half precision overflow.
        by_dtype.setdefault(torch.promote_types(x.dtype, torch.float32), []).append(x)
    norms = [
        norm.to(tensors[0].device, max(by_dtype, key=lambda dtype: dtype.itemsize))
        for dtype, own in by_dtype.items()
        for norm in torch._foreach_norm(own, 2, dtype=dtype)
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def amplification(relative_update: Tensor, grad_scale: float | Tensor) -> Tensor:
    """‖update‖ / (lr · GradScale): the size of a step relative to the evidence for it.

    With plain gradient descent it is ‖gradient‖ / GradScale, the size that the contrastive gradient
    would have with a competitive negative. It rises where the optimizer undoes GradScale.

    Args:
        relative_update: ‖update / lr‖, 0-dim.
        grad_scale: GradScale of the loss; 1 if it does not scale the gradient (β* = 0). Infinite or
            NaN results if it is 0.
    """
    return relative_update / grad_scale
