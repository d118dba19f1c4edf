"""How large gradients and updates are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["total_norm"]


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
