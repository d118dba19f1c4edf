"""How much of the weight each sampler of a mixture carries, and how good its negatives are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..objective import Terms

__all__ = ["mixture_sums", "named_mixture"]


def mixture_sums(terms: Terms, f_neg: Tensor, parts: Tensor) -> Tensor:
    """What :func:`named_mixture` makes numbers of, ``((exponents + 2) * samplers,)``.

    At each exponent of the terms, a column of them, the share of the whole weight that each
    sampler's negatives carry (Eq. 5), with classes of the weights within each positive's, averaged
    over the positives that have a negative; the sums of their energies; and how many they are.
    ``parts``, ``(samplers, M)``, says which negatives are whose.
    """
    if terms.is_grouped:
        weight = (terms.share(terms.is_paired).unsqueeze(-1) * terms.log_w.exp()).sum(-2)
    else:
        weight = terms.log_w.exp() * terms.is_neg
    shares = weight.unsqueeze(-2).where(parts, 0.0).sum(-1)
    sums = torch.where(parts, f_neg, 0.0).sum(-1)
    counts = parts.sum(-1, dtype=sums.dtype)
    return torch.cat((shares / shares.sum(-1, keepdim=True), sums[None], counts[None])).flatten()


def named_mixture(
    sums: Sequence[float], names: Sequence[str], f_pos: float
) -> list[dict[str, float]]:
    """Of each exponent ``mixture/<name>/weight``, and of the first also ``.../energy_gap``.

    The gap is how far a sampler's negatives lie below the positives, whose mean is ``f_pos``; NaN
    for a part without samples.
    """
    k = len(names)
    *weights, totals, counts = (sums[i : i + k] for i in range(0, len(sums), k))
    found = [
        {f"mixture/{name}/weight": x for name, x in zip(names, row, strict=True)} for row in weights
    ]
    for name, total, count in zip(names, totals, counts, strict=True):
        gap = f_pos - total / count if count > 0 else math.nan
        found[0][f"mixture/{name}/energy_gap"] = gap
    return found
