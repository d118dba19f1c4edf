"""The raw energies: how far positives and negatives lie apart, and how many are not finite."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..energies import LogQ
from ..objective import usable

__all__ = ["energy_diagnostics", "nonfinite_diagnostics", "wide"]

_LEVELS = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}


def energy_diagnostics(f_pos: Tensor, f_neg: Tensor) -> dict[str, Tensor]:
    """Summarise detached negative energies, ``(..., N)`` and ``(..., M)``: tensors (...) by tag.

    The std is that of the population. NaN if an energy is NaN, or infinities leave none.
    """
    # Sides of the same length are two rows of one tensor: half the kernels. Those of sums and
    # products were used before: a kernel's first use in a step costs as much as five others.
    alike = f_pos.shape == f_neg.shape
    sides = [torch.stack((f_pos, f_neg))] if alike else [f_pos, f_neg]
    ranked = [f.sort(-1).values for f in sides]
    others = [ranked[0].flip(0)] if alike else ranked[::-1]
    numbers, pairs = list[Tensor](), list[Tensor]()
    for x, ordered, opposite in zip(sides, ranked, others, strict=True):
        n = x.shape[-1]
        places, parts = _places(n, x.device)
        total = x.sum(-1, keepdim=True)
        apart = x - total / n
        low, high = wide(ordered.index_select(-1, places)).chunk(2, -1)
        moments = wide(total) / n, (wide((apart * apart).sum(-1, keepdim=True)) / n).sqrt()
        # Not beside an infinity, whose part of 0 would be NaN.
        between = torch.where(parts > 0, low + parts * (high - low), low)
        side = torch.cat((*moments, between), -1)
        # A NaN is sorted to the end and would leave the lower quantiles as they are.
        side = torch.where(side[..., -1:].isnan(), math.nan, side)
        numbers += side.unbind() if alike else [side]
        below = wide(torch.searchsorted(ordered, opposite).sum(-1))
        pairs += below.unbind() if alike else [below]
    pos, neg = (dict(zip(("mean", "std", *_LEVELS), x.unbind(-1), strict=True)) for x in numbers)
    is_known = ~(pos["max"].isnan() | neg["max"].isnan())
    overlap = (pairs[0] - pairs[1]) / (2 * f_pos.shape[-1] * f_neg.shape[-1])
    return {
        "energy_gap": pos["mean"] - neg["mean"],
        "energy_overlap": torch.where(is_known, 0.5 + overlap, math.nan),
        **{f"f_pos/{name}": x for name, x in pos.items()},
        **{f"f_neg/{name}": x for name, x in neg.items()},
    }


@lru_cache
def _places(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The lower neighbours of all quantiles among n sorted values, then the upper ones; and how
    far each quantile is from the lower one."""
    # Cached: making them again would copy from the host in every step.
    exact = [level * (n - 1) for level in _LEVELS.values()]
    places = torch.tensor([*map(math.floor, exact), *map(math.ceil, exact)], device=device)
    return places, wide(torch.tensor([x % 1 for x in exact], dtype=torch.float64)).to(device)


def nonfinite_diagnostics(
    f_pos: Tensor, f_neg: Tensor, beta_star: float | Tensor, log_q: LogQ | None = None
) -> dict[str, Tensor]:
    """Count the samples that the objective leaves out, see :func:`usable`; their share of all."""
    sides = zip((f_pos, f_neg), log_q or (None, None), strict=True)
    pos, neg = (wide((~usable(f, beta_star, q)).sum(-1)) for f, q in sides)
    share = (pos + neg) / (f_pos.shape[-1] + f_neg.shape[-1])
    return {"nonfinite/pos": pos, "nonfinite/neg": neg, "nonfinite/energies": share}


def wide(x: Tensor) -> Tensor:
    """Return x in float64, for arithmetic of few numbers; on MPS, which has none, in float32."""
    return x.float() if x.device.type == "mps" else x.double()
