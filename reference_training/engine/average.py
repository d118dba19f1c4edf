"""The mean over ranks, through which gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Average(torch.autograd.Function):
    """Every rank has the mean; so what every rank's loss asks of it, on average, is each part's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, average: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean that a function makes in place."""
        ctx.average = average
        return average(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The mean of the gradients."""
        return ctx.average(grad.clone()), None
