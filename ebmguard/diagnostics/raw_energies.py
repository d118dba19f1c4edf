"""The raw energies: how far positives and negatives lie apart, and how many are not finite."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..energies import LogQ
from ..objective import usable

__all__ = ["energy_diagnostics", "nonfinite_diagnostics"]

_QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}


def energy_diagnostics(f_pos: Tensor, f_neg: Tensor) -> dict[str, Tensor]:
    """Summaries of detached negative energies, ``(N,)`` and ``(M,)``, or ``(*models, N or M)``.

    Returns:
        0-dim tensors, or ``(*models,)``: ``energy_gap`` = mean f⁺ - mean f⁻; ``energy_overlap`` =
        P(f⁻ > f⁺) with ties counted half (0.5 when the two look alike, 0 when every negative lies
        below every positive); ``f_pos/...`` and ``f_neg/...``: mean, std (of the population),
        min, q05, median, q95, max. NaN if an energy is NaN, or if infinities leave a number
        undefined.
    """
    # Few kinds of kernels, see weight_diagnostics_at, and one pass for sides of the same shape.
    if f_pos.shape == f_neg.shape:
        ranked = torch.stack((f_pos, f_neg)).sort(-1).values
        pos, neg = _summaries(ranked)
        ranked_pos, ranked_neg = ranked.unbind()
    else:
        ranked_pos, ranked_neg = f_pos.sort(-1).values, f_neg.sort(-1).values
        (pos,), (neg,) = _summaries(ranked_pos.unsqueeze(0)), _summaries(ranked_neg.unsqueeze(0))
    ranked_neg = ranked_neg.contiguous()
    below = torch.searchsorted(ranked_pos, ranked_neg)
    not_above = torch.searchsorted(ranked_pos, ranked_neg, right=True)
    pairs = f_pos.shape[-1] * f_neg.shape[-1]
    overlap = (below + not_above).sum(-1).to(ranked_pos.dtype) * (0.5 / pairs)
    return {
        "energy_gap": pos["mean"] - neg["mean"],
        "energy_overlap": overlap + _spoiler(pos["max"]) + _spoiler(neg["max"]),
        **{f"f_pos/{name}": value for name, value in pos.items()},
        **{f"f_neg/{name}": value for name, value in neg.items()},
    }


def nonfinite_diagnostics(
    f_pos: Tensor, f_neg: Tensor, beta_star: float | Tensor, log_q: LogQ | None = None
) -> dict[str, Tensor]:
    """Samples that the objective leaves out: f or log q not finite, or |β* f| > 1e30.

    Returns:
        ``nonfinite/pos`` and ``nonfinite/neg`` as counts, ``nonfinite/energies`` as a fraction;
        0-dim, or ``(*models,)``.
    """
    if isinstance(beta_star, Tensor):
        beta_star = beta_star.unsqueeze(-1)
    pos, neg = (
        f.shape[-1] - usable(f, beta_star, q).to(f.dtype).sum(-1)
        for f, q in zip((f_pos, f_neg), log_q or (None, None), strict=True)
    )
    return {
        "nonfinite/pos": pos,
        "nonfinite/neg": neg,
        "nonfinite/energies": (pos + neg) * (1 / (f_pos.shape[-1] + f_neg.shape[-1])),
    }


def _summaries(ranked: Tensor) -> list[dict[str, Tensor]]:
    """Summaries of each entry of the first dimension, of values sorted along the last."""
    n = ranked.shape[-1]
    mean = ranked.sum(-1) * (1 / n)
    deviation = ranked - mean.unsqueeze(-1)
    below, above, part = _positions(n, ranked.dtype, ranked.device)
    low, high = ranked.index_select(-1, below), ranked.index_select(-1, above)
    least, most = ranked[..., 0], ranked[..., -1]
    # A NaN is sorted to the end and would leave the lower quantiles as they are.
    spoiler = _spoiler(most)
    table = (
        mean,
        ((deviation * deviation).sum(-1) * (1 / n)).sqrt(),
        least + spoiler,
        *(low + part * (high - low) + spoiler.unsqueeze(-1)).unbind(-1),
        most,
    )
    names = ("mean", "std", "min", *_QUANTILES, "max")
    return [
        dict(zip(names, numbers.unbind(), strict=True))
        for numbers in torch.stack(table, 1).unbind()
    ]


def _spoiler(largest: Tensor) -> Tensor:
    """NaN where the last of sorted energies is NaN, else 0."""
    return 0.0 * largest.clamp(-1.0, 1.0)


@lru_cache
def _positions(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each quantile its two neighbours among n sorted values and its place between them."""
    # Cached: making them again would copy from the host in every step.
    exact = [level * (n - 1) for level in _QUANTILES.values()]
    return (
        torch.tensor([math.floor(x) for x in exact], device=device),
        torch.tensor([math.ceil(x) for x in exact], device=device),
        torch.tensor([x - math.floor(x) for x in exact], dtype=dtype, device=device),
    )
