"""What the raw energies say: how far positives and negatives lie apart, and whether any is lost."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..objective import usable

__all__ = ["energy_diagnostics", "nonfinite_diagnostics"]

_QUANTILES = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}


def energy_diagnostics(f_pos: Tensor, f_neg: Tensor) -> dict[str, Tensor]:
    """Summaries of detached negative energies, ``(N,)`` and ``(M,)``, or ``(*models, N or M)``.

    Returns:
        0-dim tensors, or ``(*models,)``: ``energy_gap`` = mean f⁺ - mean f⁻; ``energy_overlap`` =
        P(f⁻ > f⁺) with ties counted half (0.5 when the two look alike, 0 when every negative is
        worse than every positive); ``f_pos/...`` and ``f_neg/...``: mean, std (of the population),
        min, q05, median, q95, max. NaN where an energy they need is NaN.
    """
    if f_pos.shape == f_neg.shape:  # one pass for both sides: kernels are what this costs
        ranked = torch.stack((f_pos, f_neg)).sort(-1).values
        both = _summary(ranked)
        pos, neg = ({name: x[i] for name, x in both.items()} for i in (0, 1))
        ranked_pos, ranked_neg = ranked.unbind()
    else:
        ranked_pos, ranked_neg = f_pos.sort(-1).values, f_neg.sort(-1).values
        pos, neg = _summary(ranked_pos), _summary(ranked_neg)
    return {
        "energy_gap": pos["mean"] - neg["mean"],
        "energy_overlap": _overlap(ranked_pos, ranked_neg),
        **{f"f_pos/{name}": value for name, value in pos.items()},
        **{f"f_neg/{name}": value for name, value in neg.items()},
    }


def nonfinite_diagnostics(
    f_pos: Tensor, f_neg: Tensor, beta_star: float | Tensor
) -> dict[str, Tensor]:
    """Samples that the objective leaves out: not finite, or |β* f| > 1e30.

    Returns:
        ``nonfinite/pos`` and ``nonfinite/neg`` as counts, ``nonfinite/energies`` as a fraction;
        0-dim, or ``(*models,)``.
    """
    if isinstance(beta_star, Tensor):
        beta_star = beta_star.unsqueeze(-1)
    n, m = f_pos.shape[-1], f_neg.shape[-1]
    lost = ~usable(torch.cat((f_pos, f_neg), -1), beta_star)
    pos = lost[..., :n].sum(-1, dtype=f_pos.dtype)
    neg = lost[..., n:].sum(-1, dtype=f_pos.dtype)
    return {
        "nonfinite/pos": pos,
        "nonfinite/neg": neg,
        "nonfinite/energies": (pos + neg) / (n + m),
    }


def _summary(ranked: Tensor) -> dict[str, Tensor]:
    below, above, part = _positions(ranked.shape[-1], ranked.dtype, ranked.device)
    low, high = ranked.index_select(-1, below), ranked.index_select(-1, above)
    # The difference of two equal infinities is NaN, which is not the quantile.
    quantiles = torch.where(low == high, low, torch.lerp(low, high, part))
    # NaN is sorted to the end, where it would spare the lower quantiles.
    quantiles = torch.where(torch.isnan(ranked[..., -1:]), torch.nan, quantiles)
    return {
        "mean": ranked.mean(-1),
        "std": ranked.std(-1, correction=0),
        **dict(zip(_QUANTILES, quantiles.unbind(-1), strict=True)),
    }


@lru_cache
def _positions(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Per quantile its two neighbours among n sorted values, and how far it lies between them."""
    # Kept, since making them anew would copy from the host in every step.
    exact = [level * (n - 1) for level in _QUANTILES.values()]
    return (
        torch.tensor([math.floor(x) for x in exact], device=device),
        torch.tensor([math.ceil(x) for x in exact], device=device),
        torch.tensor([x - math.floor(x) for x in exact], dtype=dtype, device=device),
    )


def _overlap(ranked_pos: Tensor, ranked_neg: Tensor) -> Tensor:
    ranked_neg = ranked_neg.contiguous()
    below = torch.searchsorted(ranked_pos, ranked_neg)
    not_above = torch.searchsorted(ranked_pos, ranked_neg, right=True)
    pairs = 2 * ranked_pos.shape[-1] * ranked_neg.shape[-1]
    overlap = (below + not_above).sum(-1, dtype=ranked_pos.dtype) / pairs
    known = ranked_pos[..., -1] + ranked_neg[..., -1]
    return torch.where(torch.isnan(known), torch.nan, overlap)
