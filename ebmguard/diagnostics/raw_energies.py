"""The raw energies: how far positives and negatives lie apart, and how many are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..energies import LogQ
from ..objective import usable

__all__ = [
    "T",
    "energy_diagnostics",
    "energy_sums",
    "known",
    "named_energies",
    "named_nonfinite",
    "nonfinite_diagnostics",
]

T = TypeVar("T", float, Tensor)

_LEVELS = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}


def energy_diagnostics(f_pos: Tensor, f_neg: Tensor) -> dict[str, Tensor]:
    """Summarise detached negative energies, ``(N,)`` and ``(M,)``: 0-dim tensors by tag.

    The std is that of the population. NaN if an energy is NaN, or infinities leave none.
    """
    return named_energies(energy_sums(f_pos, f_neg).unbind(), len(f_pos), len(f_neg))


def energy_sums(f_pos: Tensor, f_neg: Tensor) -> Tensor:
    """The sums for :func:`named_energies`, ``(26,)``.

    They are the order statistics below and above the quantiles of either side, its sum of squares
    around the mean, and its sum; then the numbers of pairs with f⁺ < f⁻ and with f⁻ < f⁺.
    """
    # Sides of the same length are two rows of one tensor: half the kernels. Those of sums and
    # products were used before: a kernel's first use in a step costs as much as five others.
    alike = f_pos.shape == f_neg.shape
    sides = [torch.stack((f_pos, f_neg))] if alike else [f_pos, f_neg]
    ranked = [f.sort(-1).values for f in sides]
    others = [ranked[0].flip(0)] if alike else ranked[::-1]
    sums: tuple[list[Tensor], ...] = [], [], [], []
    places, squares, totals, pairs = sums
    for x, ordered, opposite in zip(sides, ranked, others, strict=True):
        places.append(ordered.index_select(-1, _places(x.shape[-1], x.device)))
        totals.append(x.sum(-1, keepdim=True))
        apart = x - totals[-1] / x.shape[-1]
        squares.append((apart * apart).sum(-1))
        pairs.append(torch.searchsorted(ordered, opposite).sum(-1, dtype=f_pos.dtype))
    return torch.cat([x.flatten() for parts in sums for x in parts])


def named_energies(sums: Sequence[T], n: int, m: int) -> dict[str, T]:
    """The numbers of n positives and m negatives by tag, from sums as tensors or as floats."""
    k = 2 * len(_LEVELS)
    squares_pos, squares_neg, sum_pos, sum_neg, below, above = sums[2 * k :]
    mean_pos, mean_neg = sum_pos / n, sum_neg / m
    numbers = _named_side("f_pos", sums[:k], squares_pos / n, mean_pos, n)
    numbers |= _named_side("f_neg", sums[k : 2 * k], squares_neg / m, mean_neg, m)
    pos, neg = numbers["f_pos/max"], numbers["f_neg/max"]
    (difference,) = known((pos == pos) & (neg == neg), [below - above])
    overlap = 0.5 + difference / (2 * n * m)
    return {"energy_gap": mean_pos - mean_neg, "energy_overlap": overlap, **numbers}


def _named_side(side: str, ranked: Sequence[T], var: T, mean: T, count: int) -> dict[str, T]:
    numbers: dict[str, T] = {"mean": mean, "std": var**0.5}
    k = len(_LEVELS)
    for (name, level), a, b in zip(_LEVELS.items(), ranked[:k], ranked[k:], strict=True):
        part = level * (count - 1) % 1
        numbers[name] = a + part * (b - a) if part else a
    # A NaN is sorted to the end and would leave the lower quantiles as they are.
    values = known(numbers["max"] == numbers["max"], [*numbers.values()])
    return {f"{side}/{name}": x for name, x in zip(numbers, values, strict=True)}


def known(condition: Any, values: Sequence[Any]) -> Sequence[Any]:
    """The values if the condition holds, else NaN, by which floats can be divided."""
    if isinstance(condition, Tensor):
        return [torch.where(condition, x, math.nan) for x in values]
    return values if condition else [math.nan] * len(values)


@lru_cache
def _places(n: int, device: torch.device) -> Tensor:
    """The lower neighbours of all quantiles among n sorted values, then the upper ones."""
    # Cached: making them again would copy from the host in every step.
    exact = [level * (n - 1) for level in _LEVELS.values()]
    return torch.tensor([*map(math.floor, exact), *map(math.ceil, exact)], device=device)


def nonfinite_diagnostics(
    f_pos: Tensor, f_neg: Tensor, beta_star: float | Tensor, log_q: LogQ | None = None
) -> dict[str, Tensor]:
    """Count the samples that the objective leaves out, see :func:`usable`; their share of all."""
    sides = zip((f_pos, f_neg), log_q or (None, None), strict=True)
    pos, neg = ((~usable(f, beta_star, q)).sum(-1, dtype=f.dtype) for f, q in sides)
    return named_nonfinite(pos, neg, len(f_pos), len(f_neg))


def named_nonfinite(pos: T, neg: T, n: int, m: int) -> dict[str, T]:
    """The numbers from the counts of n positives and m negatives that are left out."""
    return {"nonfinite/pos": pos, "nonfinite/neg": neg, "nonfinite/energies": (pos + neg) / (n + m)}
