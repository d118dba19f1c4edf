"""Numbers named once: the same arithmetic for tensors, and for floats that a row has brought."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["T", "exp", "known"]

T = TypeVar("T", float, Tensor)


def exp(x: T) -> T:
    """The exponential function."""
    return math.exp(x) if isinstance(x, float) else x.exp()


def known(condition: Any, values: Callable[[], list[T]], count: int) -> list[T]:
    """The values where the condition holds, else NaN, which arithmetic of floats would refuse."""
    found: list[Any] = (
        values() if isinstance(condition, Tensor) or condition else [math.nan] * count
    )
    if isinstance(condition, Tensor):
        found = [torch.where(condition, x, math.nan) for x in found]
    return found
