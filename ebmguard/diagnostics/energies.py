"""What the raw energies say: how far positives and negatives lie apart, and whether any is lost."""

from __future__ import annotations

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
        pos, neg = (
            {k: v[i] for k, v in _summary(torch.stack((f_pos, f_neg))).items()} for i in (0, 1)
        )
    else:
        pos, neg = _summary(f_pos), _summary(f_neg)
    return {
        "energy_gap": pos["mean"] - neg["mean"],
        "energy_overlap": _overlap(f_pos, f_neg),
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
    pos, neg = ((~usable(f, beta_star)).sum(-1, dtype=f.dtype) for f in (f_pos, f_neg))
    total = f_pos.shape[-1] + f_neg.shape[-1]
    return {
        "nonfinite/pos": pos,
        "nonfinite/neg": neg,
        "nonfinite/energies": (pos + neg) / total,
    }


def _summary(f: Tensor) -> dict[str, Tensor]:
    mean = f.mean(-1)
    std = (f - mean.unsqueeze(-1)).square().mean(-1).sqrt()
    quantiles = torch.quantile(f, _levels(f.dtype, f.device), dim=-1)
    return {"mean": mean, "std": std, **dict(zip(_QUANTILES, quantiles.unbind(), strict=True))}


@lru_cache
def _levels(dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept, since making it anew would copy from the host in every step.
    return torch.tensor(list(_QUANTILES.values()), dtype=dtype, device=device)


def _overlap(f_pos: Tensor, f_neg: Tensor) -> Tensor:
    ranked = f_pos.sort(-1).values
    f_neg = f_neg.contiguous()
    below = torch.searchsorted(ranked, f_neg)
    not_above = torch.searchsorted(ranked, f_neg, right=True)
    overlap = (below + not_above).to(f_pos.dtype).mean(-1) / (2 * f_pos.shape[-1])
    known = ~(torch.isnan(f_pos).any(-1) | torch.isnan(f_neg).any(-1))
    return torch.where(known, overlap, torch.nan)
